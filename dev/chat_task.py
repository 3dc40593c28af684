"""
A made task whose answers can be checked: conversations of four kinds, and questions that are in none of them.

    $ python dev/chat_task.py --to=FOLDER          # train.jsonl, and questions.jsonl for eval.py --tasks

    sum        two numbers below 100 are added
    reverse    3 to 8 letters are reversed
    sort       3 to 6 numbers below 100 are sorted
    lookup     a value is looked up in a table of 4 to 8 rows, which the system's turn gives

Fixed before anything was trained on it; the same seed writes the same files.
"""

import json
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import configure, fail

# -----------------------------------------------------------------------------
to = 'chat_task'  # the folder for the two files
conversations = 20_000  # the four kinds in turn; each conversation has one to three questions
questions = 1_000  # to test with, the four kinds in turn
seed = 1337
# -----------------------------------------------------------------------------
configure(globals())

LETTERS = 'abcdefghijklmnopqrstuvwxyz'
NAMES = ('Ada Ben Cleo Dan Eve Finn Gus Hal Ida Jon Kim Leo Mia Ned Ona Pia Quin Ray Sue Tom Uma Val Wes Xia '
         'Yan Zoe').split()
KINDS = ('sum', 'reverse', 'sort', 'lookup')


def make(kind, rng):
    """(system's turn or None, question, answer, what makes the question itself: the same for the same)"""
    if kind == 'sum':
        a, b = rng.randrange(100), rng.randrange(100)
        return None, f"What is {a} + {b}?", str(a + b), (kind, a, b)
    if kind == 'reverse':
        word = ''.join(rng.choice(LETTERS) for _ in range(rng.randint(3, 8)))
        return None, f"Reverse {word}.", word[::-1], (kind, word)
    if kind == 'sort':
        numbers = [rng.randrange(100) for _ in range(rng.randint(3, 6))]
        return (None, f"Sort {' '.join(map(str, numbers))}.", ' '.join(map(str, sorted(numbers))),
                (kind, *numbers))
    names = rng.sample(NAMES, rng.randint(4, 8))
    table = {name: rng.randrange(100) for name in names}
    asked = rng.choice(names)
    system = '\n'.join(f'{name}: {value}' for name, value in table.items())
    return system, f"What is the number of {asked}?", str(table[asked]), (kind, asked, *table.items())


def main():
    if conversations < 4 or questions < 4:
        fail(f"too few ({conversations} conversations, {questions} questions). use 4 or more of each")
    rng = random.Random(seed)
    tests, taken = [], set()
    while len(tests) < questions:
        kind = KINDS[len(tests) % 4]
        system, question, answer, itself = make(kind, rng)
        if itself in taken:
            continue
        taken.add(itself)
        messages = [{'role': 'system', 'content': system}] if system else []
        messages.append({'role': 'user', 'content': question})
        tests.append({'kind': 'generate', 'group': kind, 'messages': messages, 'answer': answer})
    rows = []
    while len(rows) < conversations:
        kind, messages = KINDS[len(rows) % 4], []
        # a table is asked about once; the others one to three times, in any order
        kinds = [kind] + [rng.choice(KINDS[:3]) for _ in range(rng.randrange(3))]
        for kind in kinds[:1] if kind == 'lookup' else kinds:
            system, question, answer, itself = make(kind, rng)
            while itself in taken:
                system, question, answer, itself = make(kind, rng)
            if system:
                messages.append({'role': 'system', 'content': system})
            messages += [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
        rows.append({'messages': messages})
    os.makedirs(to, exist_ok=True)
    for name, lines in (('train', rows), ('questions', tests)):
        path = os.path.join(to, f'{name}.jsonl')
        with open(path, 'w') as f:
            f.writelines(json.dumps(line) + '\n' for line in lines)
        print(f"{path}: {len(lines):,} lines")


main()

"""
Conversations from .jsonl (also .gz, .zst) and .parquet, in the three forms that people have:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}
"""

import re

from configurator import fail
from support.read_text import find_files
from support.read_text import object_of, open_parquet, open_text, read_lines

FROM = {'system': 'system', 'human': 'user', 'user': 'user', 'gpt': 'assistant', 'assistant': 'assistant'}


def messages_of(row):
    """The messages of a row in one of the three forms. ValueError says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    if row.get('messages') is not None:
        messages = [message_of(m, 'role', 'content') for m in list_of(row['messages'])]
    elif row.get('conversations') is not None:
        messages = [message_of(m, 'from', 'value') for m in list_of(row['conversations'])]
    elif row.get('instruction') is not None and row.get('output') is not None:
        question = text_of(row['instruction'])
        if row.get('input'):
            question += '\n\n' + text_of(row['input'])
        messages = [{'role': 'user', 'content': question},
                    {'role': 'assistant', 'content': text_of(row['output'])}]
    else:
        raise ValueError(f"it has neither messages nor conversations nor instruction and output, but "
                         f"{', '.join(map(str, row))[:80]}")
    check_order(messages)
    return messages


def list_of(value):
    if not isinstance(value, list):
        raise ValueError(f"its messages are {type(value).__name__}, not a list")
    return value


def text_of(value):
    if isinstance(value, list):  # [{"type": "text", "text": "..."}]
        parts = [part.get('text') if isinstance(part, dict) else None for part in value]
        value = ''.join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(value, str):
        raise ValueError("a content is not text")
    if not value.strip():
        raise ValueError("a content is empty")
    return value.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')  # half a pair: U+FFFD


def message_of(message, role, content):
    if not isinstance(message, dict):
        raise ValueError("a message is not a JSON object")
    if message.get(role) not in FROM:
        raise ValueError(f"a {role} is {message.get(role)!r:.40}, not one of {', '.join(FROM)}")
    return {'role': FROM[message[role]], 'content': text_of(message.get(content))}


def check_order(messages):
    """A system message or none, then questions and answers in turn."""
    roles = [message['role'] for message in messages]
    turns = roles[1:] if roles[:1] == ['system'] else roles
    expected = ['user', 'assistant'] * (len(turns) // 2)
    if not turns or turns != expected:
        raise ValueError(f"its roles are in a wrong order ({', '.join(roles)[:80] or 'none'}); they should "
                         "be user, assistant, user, assistant, ..., after a system message or none")


def read_conversations(source, on_bad='stop'):
    """Yield the messages of each conversation in a file, folder or pattern. on_bad: 'stop' ends the script
    at the first row that is none, 'skip' leaves it out; the number of those is returned."""
    skipped = 0
    for file in find_files(source):
        for where, row in rows(file.path):
            try:
                yield messages_of(row)
            except ValueError as e:
                if on_bad == 'stop':
                    fail(f"{where} is no conversation: {e}. correct it, or leave out all such rows with "
                         "--bad_rows=skip")
                skipped += 1
    return skipped


def rows(path):
    """Yield (file and number, object) for each line or row."""
    if path.endswith('.parquet'):
        yield from parquet_rows(path)
        return
    if not re.search(r'\.jsonl(\.gz|\.zst)?$', path):
        fail(f"conversations are read from .jsonl, .jsonl.gz, .jsonl.zst and .parquet ({path}). convert it")
    with open_text(path) as (f, _):
        for number, line in enumerate(read_lines(f, path), 1):
            if line.strip():
                where = f'{path}:{number}'
                yield where, object_of(line, where)


def parquet_rows(path):
    number = 0
    with open_parquet(path) as f:
        for batch in f.iter_batches(256, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield f'{path}, row {number}', row

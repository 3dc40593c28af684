"""A conversation at a terminal, or one answer to each prompt: what sample.py --chat does."""

from configurator import fail
from support.chat_format import chat_format
from configurator import escape_control_characters
from support.streaming import Sample

HELP = "/system TEXT sets what stands before the conversation, /reset begins a new one, Ctrl-D ends"


def cut_at_turns(messages, fits):
    """The messages, less the oldest questions with their answers while fits(messages) is False. None if not
    even the last question fits."""
    system = messages[:1] if messages[0]['role'] == 'system' else []
    turns = messages[len(system):]
    while turns and not fits(system + turns):
        turns = turns[2:]
    return system + turns if turns else None


class Session:
    """A model and the messages so far. generate: a function (ids, on_token) that stops at the stop ids."""

    def __init__(self, model, tokenizer, max_new_tokens, generate):
        self.format = chat_format(tokenizer)
        if self.format is None:
            fail("this model knows no conversations: its tokenizer has neither roles nor a chat template. "
                 "finetune it on some: python prepare.py NAME --chat --input=FILE, then "
                 "config/finetune_chat.py")
        self.tokenizer, self.generate = tokenizer, generate
        self.room = model.config.block_size - min(max_new_tokens, model.config.block_size // 2)
        self.messages = []

    def ids(self, messages):
        return self.format.render(messages, answer=True)[0].tolist()

    def system(self, text):
        """Begin a new conversation with this system's turn."""
        self.messages = [{'role': 'system', 'content': text}] if text else []

    def answer(self, question, write=lambda text: None):
        """The model's answer, given to `write` piece by piece. It is kept, also if it was interrupted.
        ValueError if the question is too long or cannot be encoded."""
        asked = [*self.messages, {'role': 'user', 'content': question}]
        kept = cut_at_turns(asked, lambda messages: len(self.ids(messages)) <= self.room)
        if kept is None:
            raise ValueError(f"that is longer than the model can read ({self.room} tokens)")
        if len(kept) < len(asked):
            write(f"({len(asked) - len(kept)} earlier messages no longer fit and are forgotten)\n")
        ids = self.ids(kept)
        sample = Sample(ids, len(ids), self.tokenizer, self.format.stop_ids)

        def on_token(new):
            sample.add(new.item())
            write(sample.new_text())
            return sample.done

        self.generate(ids, on_token)
        sample.finish()
        write(sample.new_text())
        self.messages = [*kept, {'role': 'assistant', 'content': sample.text}]
        return sample.text


def answer_file(session, questions):
    """Print the answer to each question, a conversation of its own; for scripts."""
    for question in questions:
        session.messages = [m for m in session.messages if m['role'] == 'system']
        try:
            print(session.answer(question).replace('\n', '\\n'), flush=True)
        except ValueError as e:
            fail(f"a prompt cannot be answered: {e}. shorten it")


def print_live(text):
    print(escape_control_characters(text), end='', flush=True)


def talk(session):
    """Turns at the terminal until Ctrl-D. Ctrl-C ends an answer."""
    print(HELP)
    while True:
        try:
            line = input('> ').strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, text = line.partition(' ')
        if command == '/reset':
            session.system(next((m['content'] for m in session.messages if m['role'] == 'system'), ''))
        elif command == '/system':
            session.system(text)
        elif command.startswith('/'):
            print(HELP)
        elif line:
            try:
                session.answer(line, print_live)
            except ValueError as e:
                print(f"({e})", end='')
            print()

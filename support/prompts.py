"""Prompts, one per line, as sample.py and train.py read them."""


def prompts_in(text):
    """The prompts in a file's text: its lines but the empty ones; \\n is a new line inside a prompt."""
    lines = [line.rstrip('\r') for line in text.split('\n')]
    return [line.replace('\\n', '\n') for line in lines if line.strip()]

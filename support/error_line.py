"""A long error in a few words."""

import re


def shorten(text):
    """The first line of an error's text, without what only a developer of torch can use, and with its
    parentheses closed."""
    text = text.strip().splitlines()[0]
    if found := re.search(r'[Tt]ried to allocate ([\d.]+ \w+)', text):
        return f"tried to allocate {found[1]}"
    text = re.sub(r'^\[\S+\] ', '', text)  # the line of the source that gloo's messages begin with
    if len(text) > 160:
        text = text[:160].rsplit(' ', 1)[0] + ' ...'
    return text + ')' * (text.count('(') - text.count(')'))

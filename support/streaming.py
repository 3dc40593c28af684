"""Text from token ids while they are generated: whole characters only, and nothing of the text to stop at."""


class Sample:
    """A text that is being generated. `ids`: the prompt's, of which the first `hidden` are not shown."""

    def __init__(self, ids, hidden, tokenizer, stop_ids=(), stop_text=None):
        self.ids, self.tokenizer = ids, tokenizer
        self.stop_ids, self.stop_text = stop_ids, stop_text
        self.done = False  # it needs no more ids
        self.finished = False  # its text is complete
        self.shown = ids[hidden:]
        self.text = tokenizer.decode(self.shown)
        self.begin = len(self.text)  # where the stop text may begin: behind the prompt
        self.taken = 0  # characters that new_text() has returned
        # the ids from n_decoded on are not in the text yet. They are decoded together with those from
        # n_context on, as some tokenizers decode the beginning of a text differently
        self.n_context, self.n_decoded = 0, len(self.shown)

    def add(self, id):
        """Take the next id."""
        self.done = self.done or id in self.stop_ids
        if not self.done:
            self.shown.append(id)
            self.decode()

    def finish(self):
        """No more ids will come: decode what is left, be it part of a character."""
        self.decode(last=True)
        self.finished = True

    def decode(self, last=False):
        before = self.tokenizer.decode(self.shown[self.n_context:self.n_decoded])
        now = self.tokenizer.decode(self.shown[self.n_context:])
        if now.endswith('\ufffd') and not last:
            return  # this character lacks some of its bytes
        self.text += now[len(before):]
        self.n_context, self.n_decoded = self.n_decoded, len(self.shown)
        at = self.text.find(self.stop_text, self.begin) if self.stop_text else -1
        if at >= 0:
            self.text, self.done = self.text[:at], True

    def new_text(self):
        """The text since the last call, without an end that may become the stop text."""
        end = len(self.text)
        if self.stop_text and not self.done and not self.finished:
            starts = [self.stop_text[:n] for n in range(len(self.stop_text))]
            end -= max(len(start) for start in starts if self.text.endswith(start, self.begin))
        new = self.text[self.taken:end]
        self.taken = max(end, self.taken)
        return new

"""Attention that stays inside a text, where several texts lie in one window."""

import torch


def document_mask(texts):
    """texts (B, T), the number of the text that a position belongs to (-1: none). Returns a mask
    (B, 1, T, T), True where the query in a row may look at the key in a column: not later, and of the same
    text."""
    T = texts.size(1)
    same = texts[:, :, None] == texts[:, None, :]
    causal = torch.ones(T, T, dtype=torch.bool, device=texts.device).tril()
    return (same & causal)[:, None]


def positions_in_text(texts):
    """The position of each token in its own text, (B, T), counted from 0."""
    T = texts.size(1)
    at = torch.arange(T, device=texts.device).expand_as(texts)
    begins = torch.ones_like(texts, dtype=torch.bool)
    begins[:, 1:] = texts[:, 1:] != texts[:, :-1]
    return at - torch.where(begins, at, 0).cummax(dim=1).values

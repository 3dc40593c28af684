"""Attention that stays inside a text, where several texts lie in one window."""

import torch


def document_mask(doc_ids):
    """doc_ids (B, T), the number of the text that a position belongs to (-1: none). Returns a mask
    (B, 1, T, T), True where the query in a row may look at the key in a column: not later, and of the same
    text."""
    T = doc_ids.size(1)
    same = doc_ids[:, :, None] == doc_ids[:, None, :]
    causal = torch.ones(T, T, dtype=torch.bool, device=doc_ids.device).tril()
    return (same & causal)[:, None]


def positions_in_text(doc_ids):
    """The position of each token in its own text, (B, T), counted from 0."""
    T = doc_ids.size(1)
    at = torch.arange(T, device=doc_ids.device).expand_as(doc_ids)
    begins = torch.ones_like(doc_ids, dtype=torch.bool)
    begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return at - torch.where(begins, at, 0).cummax(dim=1).values

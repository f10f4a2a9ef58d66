"""Constraints of actions: which token may come next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from marft_jax.plugins import load_extra

Constraint = Callable[[Sequence[int]], np.ndarray | None]
"""The ids that were sampled so far to the tokens that may come next, ``bool [V]``; None for any. It
is called once for each token of an action, in order."""


Forms = Callable[[str], Constraint]
"""Makes the constraint of an action's form, see ``Request.form``."""


def forms_of(tokenizer: object, vocabulary: int) -> Forms:
    """Makes the constraints of forms, for a base with that tokenizer and that many ids."""
    return lambda form: load_extra("form.constraint")(tokenizer, vocabulary, form)


def constraint_of(
    choices: Sequence[tuple[int, ...]], form: str, vocabulary: int, forms: Forms | None
) -> Constraint | None:
    """Makes the constraint of an action, if it has one; choices and form as of a ``Request``."""
    if choices:
        return one_of(choices, vocabulary)
    if not form:
        return None
    assert forms is not None
    return forms(form)


def masks_of(constraint: Constraint | None, ids: Sequence[int]) -> Iterator[np.ndarray | None]:
    """Yields the tokens that could come at each place of an action; None: any. From a token on that
    could not come, the action was not sampled under the constraint."""
    for n, token in enumerate(ids):
        mask = constraint and constraint(ids[:n])
        if mask is not None and not mask[token]:
            constraint = mask = None
        yield mask


def one_of(choices: Sequence[tuple[int, ...]], vocabulary: int) -> Constraint:
    """Allows these actions, each given as its ids with the end-of-turn token."""

    def allowed(ids: Sequence[int]) -> np.ndarray | None:
        n, begun = len(ids), tuple(ids)
        left = {choice[n] for choice in choices if len(choice) > n and choice[:n] == begun}
        return np.isin(np.arange(vocabulary), list(left)) if left else None  # none: finished

    return allowed

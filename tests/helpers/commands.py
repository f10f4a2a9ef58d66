"""Commands, called in this process."""

from __future__ import annotations

import pytest


def code_of(main, *argv):
    """The exit code of a command with these words."""
    with pytest.raises(SystemExit) as left:
        main([*map(str, argv)])
    return left.value.code or 0

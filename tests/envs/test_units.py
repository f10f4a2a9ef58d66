"""Units behind answers: all names, prefixes, sizes, products and quotients."""

import itertools

import pytest

from marft_jax.envs.grading import extract, units
from marft_jax.envs.grading.compare import quick

UNITS = {name: first for name, (first, _) in units._entries().items()}
WRITTEN = ("5 %s", "5\\text{ %s}", "5\\,\\mathrm{%s}", "5~\\text{%s}", "x = 5\\text{ %s}")


def same(reference, answer):
    found = extract(f"so it is \\boxed{{{answer}}}", reference)
    return found is not None and quick(reference, found)


@pytest.mark.parametrize("form", WRITTEN)
def test_every_unit_is_read_by_its_names_and_may_be_left_out(form):
    for name, first in UNITS.items():
        reference = f"5\\text{{ {first.rstrip('*')}}}"
        for prefix in ("", "k", "M", "m") if first == f"{name}*" else ("",):
            answer = form % (prefix + name)
            assert same(reference, answer) is not bool(prefix), (reference, answer)
            assert same("5", answer) is True, answer
            assert same("6", answer) is False, answer


def test_units_of_another_size_or_kind_differ():
    known = {symbol: units.read(symbol) for symbol in (name.rstrip("*") for name in UNITS.values())}
    alike = {"C", "F", "°C", "°F", "degree"}
    for one, other in itertools.permutations(known, 2):
        if known[one][1:] != known[other][1:] and not {one, other} & alike:
            assert same(f"5\\text{{ {one}}}", f"5\\text{{ {other}}}") is False, (one, other)


@pytest.mark.parametrize(
    "unit",
    ["m/s", "km/h", "m/s^2", "N m", "kg m/s", "J/(kg K)", "mol/L", "W/m^2", "V/m", "kg/m^3",
     "g/mol", "Pa s", "m^3/s", "ft/s"],
)  # fmt: skip
def test_products_and_quotients_of_units_are_read_in_every_spelling(unit):
    signs = {"·": " ", "*": " ", "\\cdot ": " ", "-": " ", " / ": "/"}
    for answer in [unit, *(unit.replace(there, sign) for sign, there in signs.items())]:
        assert same(f"5\\text{{ {unit}}}", f"5 {answer}") is True, answer
        assert same("5", f"5\\ {answer}") is True, answer
        assert same(f"5\\text{{ {unit}}}", f"6 {answer}") is False, answer
        assert same("5\\text{ lx}", f"5 {answer}") is False, answer

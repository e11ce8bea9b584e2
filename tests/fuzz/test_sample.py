"""A sample of `make fuzz`: every target, few inputs. The whole is 10,500 in under three minutes."""

import pytest

from .__main__ import SHARES, run


@pytest.mark.timeout(280)
def test_changed_inputs_are_refused_in_one_line_or_read_rightly():
    counts, wrong = run(500, seed=1, names=[name for name in SHARES if name != "sealed"])
    assert not wrong, wrong
    assert sum(sum(found.values()) for found in counts.values()) >= 480
    for name, found in counts.items():  # a fuzzer whose inputs are all refused, or all taken, finds nothing
        assert name in ("overrides", "manifest") or found["right"], (name, found)
        assert name == "metrics" or found["refused"], (name, found)


@pytest.mark.timeout(280)
def test_a_sealed_manifest_that_is_wrong_is_refused():
    _, wrong = run(60, seed=1, names=["sealed"], jobs=1)
    assert not wrong, wrong

"""Machine descriptions: every figure has a source, and bad files say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.cost import load_machine, machine_for, machine_names
from workbench.cost.machine import _FOLDER
from workbench.errors import ContentError, UnknownNameError


def test_machines_load_and_cite() -> None:
    assert machine_names() == ["b200", "gb300", "h200"]
    for name in machine_names():
        machine = load_machine(name)
        assert machine.name == name
        assert machine.sources and all(len(s) > 10 or s == "estimate" for s in machine.sources.values())
        assert "chip.hbm_tb_s" in machine.sources and set(machine.estimates()) < set(machine.sources)


def test_known_figures() -> None:
    gb300, h200 = load_machine("gb300"), load_machine("h200")
    assert (gb300.chip.hbm_tb_s, gb300.chip.sms, h200.chip.hbm_tb_s, h200.chip.sms) == (8.0, 152, 4.8, 132)
    assert gb300.limits.smem_per_sm == h200.limits.smem_per_sm == 228 * 1024
    assert gb300.microseconds(gb300.chip.clock_ghz * 1e3) == pytest.approx(1.0)


def test_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="gb300"):
        load_machine("gb30")


def test_machine_of_an_architecture() -> None:
    names = [machine_for(a).name for a in ("sm_103a", "sm_100a", "sm_90a")]
    assert names == ["gb300", "b200", "h200"]
    with pytest.raises(UnknownNameError, match="sm_103"):
        machine_for("sm_10")


def test_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((_FOLDER / "h200.toml").read_text().replace('name = "h200"', 'name = "mine"'))
    assert load_machine(path).name == load_machine(str(path)).name == "mine"
    assert load_machine(path).hash != load_machine("h200").hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[chip]", "[chip"), "is not TOML"),
        (('sms = { value = 132, source = "', 'sms = { value = 132, sauce = "'), r"chip\.sms: must be"),
        (("sms = { value = 132", "sms = { value = -1"), r"chip\.sms"),
        (("sms = { value = 132", 'sms = { value = "many"'), r"chip\.sms"),
        (("hbm_tb_s =", "hbm_gb_s ="), r"chip\.hbm_"),
        (("total =", "totally ="), "total"),
        (("fp32 = { value = 4.0", "fp32 = { value = 0.0"), "positive"),
    ],
)
def test_damaged_file_says_what_is_wrong(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    text = (_FOLDER / "h200.toml").read_text()
    assert change[0] in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(ContentError, match=message) as e:
        load_machine(path)
    assert str(path) in str(e.value)


def test_missing_file() -> None:
    with pytest.raises(ContentError, match="cannot be read"):
        load_machine("/nonexistent/machine.toml")

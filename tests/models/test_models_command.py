"""``pervit models`` tells what there is."""

from __future__ import annotations

from importlib import import_module

from pipeline.models import list_models, model_entry, registry
from support.ranks import run_forked


def test_the_list_names_every_model_with_its_paper_and_size() -> None:
    """Guards against a model that cannot be found, and against a count that is not the model's."""
    lines = run_forked("pipeline.models").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list_models()
    for line in lines:
        assert model_entry(line.split()[0]).paper in line
    (tiny,) = (line for line in lines if line.startswith("pervit_t "))
    assert "7,591,000" in tiny and "(7.6M)" in tiny and "Supplement Table S5" in tiny


def test_the_names_that_are_known_without_pytorch_are_those_that_are_registered() -> None:
    """Guards against a model that its family registers and nobody can ask for, and against a name that its family does not register."""
    for module, names in registry._FAMILIES.items():
        home = import_module(f"pipeline.models.{module}")
        registered = [name for name, each in registry.registered.items() if each.build.func.__module__ == home.__name__]
        assert sorted(registered) == sorted(names.split()), module


def test_a_model_names_its_switches() -> None:
    """Guards against a switch that is listed without its values, its default or its meaning; and against slips in the name."""
    shown = run_forked("pipeline.models", "pervit_t").stdout
    for name, field in model_entry("pervit_t").switches.model_fields.items():
        assert f"  {name} = " in shown and field.description in shown
    assert 'phi_p_init = "peripheral"    (peripheral | conv | random)' in shown
    assert "widths = null    ([int, int, int, int] | null)" in shown
    assert "stem_widths = null    ([int, ...] | null)" in shown
    wrong = run_forked("pipeline.models", "pervit_x", check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: model.name must be timm:NAME, module:build or one of ")
    assert "got 'pervit_x': did you mean 'pervit_t'?" in wrong.stderr

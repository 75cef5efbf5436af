"""``python -m pipeline.models`` tells what there is."""

from __future__ import annotations

from conftest import run_module

from pipeline.models import list_models, model_entry, registry


def test_the_list_names_every_model_with_its_paper_and_size() -> None:
    """Guards against a model that cannot be found, and against a count that is not the model's."""
    lines = run_module("pipeline.models").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list_models()
    for line in lines:
        assert model_entry(line.split()[0]).paper in line
    (tiny,) = (line for line in lines if line.startswith("pervit_t "))
    assert "7,591,000" in tiny and "(7.6M)" in tiny and "Supplement Table S5" in tiny


def test_the_names_that_are_known_without_pytorch_are_those_that_are_registered() -> None:
    """Guards against a family written in such a way that its models are refused before it is asked."""
    model_entry("pervit_t")  # imports the families
    assert sorted(registry._registered) == sorted(registry._names_in_families())


def test_a_model_names_its_switches() -> None:
    """Guards against a switch that is listed without its values, its default or its meaning; and against slips in the name."""
    shown = run_module("pipeline.models", "pervit_t", "--gmacs").stdout
    for name, field in model_entry("pervit_t").switches.model_fields.items():
        assert f"  {name} = " in shown and field.description in shown
    assert 'phi_p_init = "peripheral"    (peripheral | conv | random)' in shown
    assert "widths = null    ([int, int, int, int] | null)" in shown
    assert "1.556     1.752   (1.6)" in shown
    wrong = run_module("pipeline.models", "pervit_x", check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: model.name is 'pervit_x' (did you mean 'pervit_t'?)")

"""The length of a run."""

from __future__ import annotations

from pipeline.stream.schedule import Schedule


def test_the_cooldown_comes_after_the_epochs() -> None:
    """Guards against epochs at the final learning rate that are taken from the cosine, or not trained."""
    schedule = Schedule(images=1000, global_batch_size=100, epochs=3, max_steps=None, cooldown_epochs=0.5)
    assert (schedule.last_step, schedule.epochs) == (35, 3)
    assert [step for step in range(1, 36) if schedule.passes(step, 1)] == [10, 20, 30, 35]
    assert Schedule(1000, 100, 3, 32, 0.5).last_step == 32

"""What kernels should have computed and a program goes by."""

from __future__ import annotations

from pipeline.step.train_step import Answer


class Yes(Answer):
    """Whether a step was taken: copied and waited for as always, and then yes."""

    def __bool__(self) -> bool:
        super().__bool__()
        return True

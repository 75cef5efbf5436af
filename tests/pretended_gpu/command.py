"""Run a command of the package on the pretended GPU, and write down what it asked of it.

    python tests/pretended_gpu/run.py -m pretended_gpu.command COUNTS.json pipeline.train ARGUMENTS

Nothing is added up on this GPU: an evaluation would find that it has looked at no image. So a sum over all ranks of float64, which is
what an evaluation counts in, is a one for each value but the last, the images whose scores are not finite; and every step was taken.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor has fresh memory, all zero: what no kernel computes is 0

import torch  # noqa: E402

from pipeline.cluster.world import World  # noqa: E402
from pipeline.step import train_step  # noqa: E402
from pretended_gpu.answers import Yes  # noqa: E402
from pretended_gpu.counts import counted  # noqa: E402


def main() -> None:
    file, module = Path(sys.argv[1]), sys.argv[2]
    summed = World.sum

    def sum_of_ones(world: World, values: torch.Tensor) -> torch.Tensor:
        total = summed(world, values)
        if total.dtype != torch.float64:
            return total
        ones = torch.ones(total.numel(), dtype=total.dtype)
        ones[-1] = 0
        return total.copy_(ones.view(total.shape))

    World.sum, train_step.Answer = sum_of_ones, Yes  # type: ignore[method-assign, misc]
    sys.argv = [module, *sys.argv[3:]]
    try:
        with counted() as counts:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    file.write_text(json.dumps(counts))
    sys.exit(code)


if __name__ == "__main__":
    main()

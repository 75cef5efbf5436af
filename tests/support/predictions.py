"""Results per image that a page about a run shows, made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.shards.shard_set import ShardSet

BAD = 17  # the training sample whose bytes tests/reports changes


def write_predictions(path: Path, shards: Path, seed: int = 0) -> Path:
    """A CSV of made-up results of the validation images: most right, some wrong."""
    opened, draw = ShardSet(shards, "val"), np.random.default_rng(seed)
    lines = ["file,top1,top1_name,probability,top5,error,label,probabilities,label_probability,loss"]
    for index in range(len(opened)):
        label = int(opened.samples["label"][index])
        ranked = [label, *draw.permutation([c for c in range(10) if c != label]).tolist()][:5]
        if draw.random() < 0.15:
            ranked[0], ranked[1] = ranked[1], ranked[0]
        shares = np.sort(draw.dirichlet(np.full(5, 0.4)))[::-1]
        own = shares[ranked.index(label)]
        words = " ".join(map(str, ranked)), " ".join(f"{share:.6f}" for share in shares)
        best = f"{ranked[0]},{ranked[0]},{shares[0]:.6f},{words[0]},"
        lines.append(f"{opened.key(index)},{best},{label},{words[1]},{own:.6f},{-np.log(max(own, 1e-9)):.5f}")
    path.write_text("\n".join(lines) + "\n")
    return path

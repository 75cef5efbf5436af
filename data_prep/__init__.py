"""From images on disk to shard sets: ``shard_imagenet.py`` and ``make_demo_dataset.py`` are the commands."""

SPLITS = ("train", "val")
MAX_REJECTED = 0.001  # of the samples


def counted(number: int, word: str) -> str:
    """``1 shard``, ``2 shards``, ``3 classes``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('s') else 's'}"

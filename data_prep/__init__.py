"""From images on disk to shard sets: ``shard_imagenet.py`` and ``make_demo_dataset.py`` are the commands."""

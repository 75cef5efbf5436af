"""Fill a node's cache with shards before a training: whole ones, as many as fit.

    pervit stage-shards DATA --cache DIR [--splits train val] [--gib N] [--workers N]

DATA and DIR have the values of data.path and data.cache. Each shard is compared with the sample table before any process can open it.
Cached shards are not fetched again, and an interrupted fetch is continued. Several commands at once, on the same
node and for the same data or another, share the work. When the cache is full, the least recently used shards of other data are removed;
training reads what does not fit from DATA.

Exits with 0 if the cache has what fits into it, with 1 if shards could not be fetched, and with 2 for wrong arguments or a folder that
cannot be written.

Examples:
    pervit stage-shards data/imagenet --cache /nvme/pervit --gib 400
    srun --ntasks-per-node=1 pervit stage-shards data/imagenet --cache /nvme/pervit
"""

from __future__ import annotations

from pathlib import Path

from data_prep import SPLITS
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError
from pipeline.stores.place import place_argument


def main() -> int:
    parser = command_parser("data_prep.stage_shards", __doc__)
    parser.add_argument("data", metavar="DATA", type=place_argument, help="the shard set, as data.path: a folder or a URL")
    parser.add_argument("--cache", required=True, metavar="DIR", help="folder on a disk of this node, as data.cache")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS), help="default: train val")
    parser.add_argument(
        "--gib", type=float, metavar="N", help="size of all shards in DIR, as data.cache_gib (default: up to 95 %% of its disk)"
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="shards to fetch at a time (default: 4)")
    args = parser.parse_args()
    if not args.cache.strip():
        raise UserError(
            "--cache must be a folder on a disk of this node, got an empty name", "pass one; a variable may be unset"
        )
    if "://" in args.cache:
        raise UserError(f"--cache must be a folder on a disk of this node, got the URL {args.cache}", "pass one")
    if args.gib is not None and not 0 < args.gib <= 2**20:
        raise UserError(f"--gib must be above 0 and at most {2**20}, got {args.gib:g}", "pass a size in GiB, or drop it")
    if not 1 <= args.workers <= 256:
        raise UserError(f"--workers must be 1 to 256, got {args.workers}", "pass the number of shards to fetch at a time")
    from data_prep.staging import stage  # imported late, so that --help is fast
    from data_prep.workers import stop_like_ctrl_c
    from pipeline.hardware import GIB
    from pipeline.shards.files.cache import ShardCache
    from pipeline.shards.files.cached import check_cache
    from pipeline.shards.shard_set import ShardSet

    stop_like_ctrl_c()
    sets = [ShardSet(args.data, split) for split in args.splits]  # all, so that an error in any is found first
    cache = ShardCache(Path(args.cache), None if args.gib is None else round(args.gib * GIB))
    for shards in sets:
        check_cache(cache, shards.files, "--cache")
    results = [stage(shards, cache, args.workers) for shards in sets]
    for result in results:
        print(result.sentence())
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    run_command(main)

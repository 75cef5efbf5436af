#!/bin/bash
# bash launch/demo.sh     what `make demo` runs: from nothing to a trained, evaluated PerViT-T on this machine, in a few minutes
#
#   source .venv/bin/activate && bash launch/demo.sh
#   CUDA_VISIBLE_DEVICES= bash launch/demo.sh              # on the CPU of a machine with GPUs
#
# Each step is a command of a real run; a second call skips what is done. It writes demo/ and runs/demo/.
set -euo pipefail

case "${1:-} $#" in
  "-h "* | "--help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;;
  " 0") ;;
  *) echo "error: demo.sh takes no arguments, got '$*'; for another model or data set: bash launch/local.sh --help" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Two processes if there are two GPUs, or two cores without a GPU.
if command -v nvidia-smi > /dev/null; then places=$(nvidia-smi --list-gpus | wc -l); else places=$(nproc); fi
processes=$((places < 2 ? 1 : 2))
result=$(mktemp)
trap 'rm -f "$result"' EXIT

echo "== 1/4 images: scikit-learn's handwritten digits as JPEG files"
python -m data_prep.make_demo_dataset --output demo/images
echo "== 2/4 shards: WebDataset tars with indexes"
python -m data_prep.shard_imagenet --source demo/images --output demo/shards --samples-per-shard 400
echo "== 3/4 training: PerViT-T, DALI and DeepSpeed, $processes processes (log: runs/demo/metrics.jsonl)"
# The global batch of 64 is 32 images on each of 2 processes, or 2 x 32 accumulated on one.
bash launch/local.sh "$processes" -- pipeline.train --config configs/demo.yaml
echo "== 4/4 evaluation of the saved checkpoint"
python -m pipeline.evaluate --checkpoint runs/demo --data demo/shards --json "$result" > /dev/null
echo
python launch/demo_summary.py "$result" runs/demo "$SECONDS" "$processes"

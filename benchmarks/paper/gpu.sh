#!/usr/bin/env bash
# Runs the cells that need a GPU, in their order, under a time limit, on one CUDA device without network.
#
#   bash benchmarks/paper/gpu.sh --data DIR --minutes 110 [--wheels DIR] [--only PATTERN] [--dry-run]
#
# Paths are relative to the repository.
#
# --wheels   folder of the wheels that the machine lacks, made beforehand with a network: pip wheel --wheel-dir DIR .
#            on the same platform and version of Python; they are unpacked beside the runs, nothing is installed
# --folder   parent folder of the run folders, default runs/paper
# --out      CSV file, default benchmarks/results/paper/gpu_cells.csv
# --commit   commit of the code, where it is not a repository
# --dry-run  cells of a few seconds on the CPU in the place of the list, to test this script; nothing is committed
#
# Finished rows are in the CSV file at once, and committed at the end if this is a repository with an author. The run
# that the time limit stops commits its last round; the same command resumes it. To go on on another machine, copy the
# folder of the runs there.
set -euo pipefail
cd "$(dirname "$0")/../.."

data=data minutes=60 wheels='' only='*' folder=runs/paper out='' commit='' dry=false
while (($#)); do
  case $1 in
    --dry-run) dry=true; shift; continue ;;
    --data | --minutes | --wheels | --only | --folder | --out | --commit) ;;
    *) echo "Unknown option $1; see the head of this file." >&2; exit 2 ;;
  esac
  (($# > 1)) || { echo "$1 needs a value." >&2; exit 2; }
  printf -v "${1#--}" '%s' "$2"
  shift 2
done
mkdir -p "$folder"

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [[ -n $wheels ]]; then
  python -m pip install --quiet --no-index --no-deps --upgrade --target "$folder/packages" "$wheels"/*.whl
  PYTHONPATH+=:$(cd "$folder/packages" && pwd)
fi

script=gpu_cells
if $dry; then
  script=tiny data='' out=${out:-$folder/tiny.csv}
else
  python -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null ||
    { echo "No CUDA device was found; use --dry-run to test this script on a CPU." >&2; exit 2; }
  out=${out:-benchmarks/results/paper/gpu_cells.csv}
fi

keep() { # commits the rows, also after a failure or a signal
  if ! $dry && git rev-parse --git-dir >/dev/null 2>&1 && [[ -n $(git status --porcelain -- benchmarks/results/paper) ]]; then
    git add -- benchmarks/results/paper
    git commit --quiet -m "Add rows of cells that need a GPU" -- benchmarks/results/paper ||
      echo "The rows are in $out, but were not committed." >&2
  fi
}
trap keep EXIT

arguments=(--data "$data" --folder "$folder" --out "$out" --only "$only" --minutes "$minutes")
[[ -z $commit ]] || arguments+=(--commit "$commit")
python "benchmarks/paper/$script.py" "${arguments[@]}"

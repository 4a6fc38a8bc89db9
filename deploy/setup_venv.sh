#!/usr/bin/env bash
# Makes .venv with the exact versions of constraints.txt; does nothing if that is done already.
# torch comes from a local disk if pip is set up with one that has it, else from PyTorch's CPU index
# unless there is an NVIDIA GPU: without one, gigabytes of CUDA libraries would be of no use.
#   PYTHON=python3.12            which Python to use (3.11 or 3.12; by default the first one found)
#   TORCH_INDEX_URL=https://...  where torch comes from, instead of all that
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.complete
torch=$(grep '^torch==' constraints.txt)
cpu_index=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*" >&2; }

find_python() {
  local candidate check
  check='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if "$candidate" -c "$check" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  say "needs Python 3.11 or 3.12 with venv; found none. Set PYTHON=/path/to/python."
  exit 1
}

has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi -L 2>/dev/null | grep -q GPU; }

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

torch_is_installed() {
  local check='import sys, importlib.metadata as m
sys.exit("torch==" + m.version("torch").split("+")[0] != sys.argv[1])'
  "$venv/bin/python" -c "$check" "$torch" 2>/dev/null
}

torch_is_local() { pip install --dry-run --no-deps --no-index "$torch" >/dev/null 2>&1; }

install_torch() {
  if torch_is_installed; then
    say "$torch is installed"
  elif [ -n "${TORCH_INDEX_URL:-}" ]; then
    say "installing $torch from $TORCH_INDEX_URL"
    pip install --no-deps --index-url "$TORCH_INDEX_URL" "$torch"
  elif torch_is_local; then
    say "installing $torch from this machine's own packages"
    pip install --no-deps --no-index "$torch"
  elif has_gpu; then
    say "installing $torch with CUDA (some gigabytes)"
    pip install --no-deps "$torch"
  else
    say "installing $torch for CPUs from $cpu_index"
    pip install --no-deps --index-url "$cpu_index" "$torch"
  fi
}

wanted=$(cat pyproject.toml constraints.txt deploy/setup_venv.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
  exit 0
fi
if ! "$venv/bin/python" -c '' 2>/dev/null; then
  python=$(find_python)
  say "creating $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
install_torch
say "installing the package and what it needs"
extras=dev
if has_gpu; then extras=dev,cuda; fi
pip install -c constraints.txt -e ".[$extras]"
echo "$wanted" > $stamp

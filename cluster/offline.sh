#!/usr/bin/env bash
# Installs Cloze where there is no network, from wheels that are gathered where there is one:
#
#     cluster/offline.sh              on a login node: gathers what requirements.lock names in wheels/
#     cluster/offline.sh install      on a node without a network, or for it: makes .venv of wheels/ alone
#
# PYTHON is the Python to use, FOR=3.12 that of the nodes if it is another one, ARCH=aarch64 their processor; WHEELS and
# VENV are other folders. CPU=1 takes torch without CUDA, from the index that PIP_EXTRA_INDEX_URL names; ONLY="tyro rich"
# gathers these alone. The wheels take 2.9 GB and the environment 5.8 GB (0.5 and 2.1 with CPU=1). pip's cache keeps them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} wheels=$(realpath -m "${WHEELS:-wheels}") venv=${VENV:-.venv} cpu=${CPU:-0} ONLY=${ONLY:-}
fail() { echo "error: $*" >&2; exit 2; }
[[ ${1:-install} == install ]] || fail "no argument gathers wheels, and 'install' installs them, not '$1'"
require_room() { # in this folder so many GB; the variable that names another one
  free=$(df -Pk "$1" | awk 'NR == 2 {print int($4 / 1048576)}')
  ((free >= $2)) || fail "$1 has $free GB free of $2 that are needed: make room, or take another folder: $3=..."
}
own=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 10))') ||
  fail "$python is no Python from 3.10 on: load one (module load python), or name it: PYTHON=/path/to/python3"
"$python" -m pip --version >/dev/null || fail "$python has no pip: $python -m ensurepip --user"
if [[ ${1:-} == install ]]; then
  compgen -G "$wheels/torch-*" >/dev/null || fail "$wheels is empty: cluster/offline.sh, where there is a network"
  mkdir -p "$venv" && require_room "$venv" $((cpu ? 3 : 7)) VENV
  "$python" -m venv "$venv" || fail "$python makes no environments: apt install python3-venv, or another PYTHON=..."
  "$venv/bin/python" -m pip install --no-index --find-links "$wheels" --requirement requirements.lock --editable . ||
    fail "$wheels does not fit, see above; for this Python: FOR=$own cluster/offline.sh where there is a network"
  exit
fi
mkdir -p "$wheels/tmp" && trap 'rm -rf "$wheels/tmp"' EXIT && require_room "$wheels" $((cpu || ${#ONLY} ? 2 : 7)) WHEELS; read -ra only <<<"$ONLY"
"$python" - "${FOR:=$own}" "${ARCH:=x86_64}" "$cpu" ${only[@]+"${only[@]}"} >"$wheels/tmp/lock" <<'EOF' # the lines for the nodes' Python
import sys; from pip._vendor.packaging.requirements import Requirement
node = {"python_version": sys.argv[1], "python_full_version": sys.argv[1] + ".0", "platform_machine": sys.argv[2]}
for each in map(Requirement, open("requirements.lock").read().splitlines()):
    if (each.marker is None or each.marker.evaluate(node)) and (not sys.argv[4:] or each.name in sys.argv[4:]):
        print(f"{each.name}{each.specifier}{'+cpu' if each.name == 'torch' and sys.argv[3] == '1' else ''}")
EOF
for_nodes=(--only-binary=:all: --python-version "$FOR" --platform={manylinux2014,manylinux_2_{17..28}}_"$ARCH")
gather() { # first what is published without wheels, which is of Python alone; the nodes' glibc is 2.28 at least
  "$python" -m pip wheel --no-deps -w "$wheels" -r <(grep -E '^(deepspeed|seqeval)=' "$wheels/tmp/lock") &&
    "$python" -m pip download "${for_nodes[@]}" --find-links "$wheels" ${ONLY:+--no-deps} -d "$wheels" -r "$wheels/tmp/lock"
}
TMPDIR=$wheels/tmp DS_BUILD_OPS=0 PIP_USE_PEP517=1 gather || # an old pip builds otherwise, and fails at it
  fail "pip has not gathered all, see above; CPU=1 needs PIP_EXTRA_INDEX_URL"
echo "$(find "$wheels" -name '*.whl' | wc -l) wheels for Python $FOR: $(du -sh "$wheels")"

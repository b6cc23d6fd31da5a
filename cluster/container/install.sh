#!/usr/bin/env bash
# Makes the environment in which Cloze runs: all of requirements.lock. The images' only step:
#
#     cluster/container/install.sh                            in an image with CUDA's compiler, as root: /opt/cloze
#     CPU=1 PREFIX=build/cpu cluster/container/install.sh     the same without CUDA, on any Debian or Ubuntu
#
# PYTHON is the Python to make it of (python3 of the distribution, with its headers). Cloze itself stays outside: the
# environment's python3 finds it in the working directory. With CPU=1 torch comes without CUDA's libraries where pip
# is offered such a build (PIP_EXTRA_INDEX_URL: PyTorch's own index for CPUs), otherwise with them.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
prefix=${PREFIX:-/opt/cloze}

fail() {
  echo "error: $*" >&2
  exit 2
}

packages=(g++ git ca-certificates openssh-client)
[[ -n ${PYTHON:-} ]] || packages+=(python3 python3-dev python3-venv)
if [[ -z ${CPU:-} ]]; then
  command -v nvcc >/dev/null || fail "no nvcc here: take an image with CUDA's compiler (devel), or CPU=1"
  packages+=(libibverbs1 ibverbs-providers librdmacm1) # through which NCCL reaches InfiniBand
fi
missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
if ((${#missing[@]})); then
  ((EUID == 0)) || fail "packages are missing: sudo apt-get install ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${missing[@]}"
  rm -rf /var/lib/apt/lists/*
fi

"${PYTHON:-python3}" -m venv "$prefix"
export PIP_USE_PEP517=1 # an old pip builds otherwise, and fails at it
pip=("$prefix/bin/python3" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --requirement "$root/requirements.lock" || fail "pip could not install requirements.lock: see above"
site=$("$prefix/bin/python3" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo "import os, sys; sys.path.append(os.getcwd())" >"$site/cloze.pth"

"$prefix/bin/python3" -c "import torch, numba, mpi4py; print('torch', torch.__version__)"

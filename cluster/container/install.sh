#!/usr/bin/env bash
# Makes the environment in which Cloze runs: all of requirements.lock, and NVIDIA apex. The images' only step:
#
#     cluster/container/install.sh                            in an image with CUDA's compiler, as root: /opt/cloze
#     CPU=1 PREFIX=build/cpu cluster/container/install.sh     the same without CUDA and apex, on any Debian or Ubuntu
#
# PYTHON is the Python to make it of (python3 of the distribution, with its headers). Cloze itself stays outside: the
# environment's python3 finds it in the working directory. With CPU=1 torch comes without CUDA's libraries where pip
# is offered such a build (PIP_EXTRA_INDEX_URL: PyTorch's own index for CPUs), otherwise with them.
set -euo pipefail

# Others have built this commit with torch 2.12 and 2.13 for CUDA 13, which tag 25.09 does not say of itself; we have
# not built it yet.
APEX=https://github.com/NVIDIA/apex COMMIT=becbb77cea4cb54f2929f7c938a0a6f7dd1fdc39
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

if [[ -z ${CPU:-} ]]; then
  source=$(mktemp -d)
  git -C "$source" init --quiet
  git -C "$source" fetch --quiet --depth 1 "$APEX" "$COMMIT"
  git -C "$source" checkout --quiet FETCH_HEAD
  # Its kernels alone are used, so what its Python needs is left out. There is no GPU here to ask what to build for.
  TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-"7.5 8.0 8.6 9.0 10.0 12.0"} APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
    "${pip[@]}" --no-build-isolation --no-deps "$source"
  rm -rf "$source"
  "$prefix/bin/python3" -c "import torch, amp_C"
fi
"$prefix/bin/python3" -c "import torch, numba, mpi4py; print('torch', torch.__version__)"

# shellcheck shell=bash
# What the job scripts of this folder have in common; they read it in the project's folder.
#
# A job that is done ends with 0. Work that was stopped (75) or that lost a rank (76) goes back into the queue as the same
# job, and continues there. Whatever else it is, somebody has to mend it: the job fails, and its log says what.

set -uo pipefail
STOPPED=75 LOST=76 # as data_prep/common/codes.py has them
TRIES=8 # starts of a job without progress; submitted again, it has as many more
WATCH_SECONDS=60
END_SECONDS=120 # that srun may outlive a failed rank or the run
step_code=0 first_code='' # of a step, and of the rank of it that failed first
had=()               # what the job has found at its start, and needs to the end

say() { printf '%(%H:%M:%S)T %s\n' -1 "$*"; }

refuse() {
  echo "error: $*" >&2
  exit 2
}

# Reads cluster/site.env, first in a shell of its own, since it must not end the one of a job or of submit.py.
read_site() {
  local options here=$PWD tried words='(^|[;&|[:space:]])(exit|exec|set +-[a-z]*[eu]|set +-o +(errexit|nounset))|:[?]'
  [[ -e cluster/site.env ]] || return 0
  bash -n cluster/site.env || refuse "cluster/site.env: the shell cannot read it"
  # shellcheck source=/dev/null
  tried=$(set -a +u; . cluster/site.env 2>&1; echo "read to its end")
  [[ $tried == *"read to its end"* ]] ||
    refuse "cluster/site.env: ends the shell, and with it all that reads it; such words do not belong there:" \
      $'\n'"$(grep -nE "$words" cluster/site.env || echo "$tried")"
  options=$(set +o)
  set -a +u # what a site runs there, such as modules, may use variables that are not set
  # shellcheck source=/dev/null
  . cluster/site.env
  trap - EXIT
  set +a
  eval "$options"
  cd "$here" || refuse "$here: cannot be entered"
}

# Prints a line for each removed variable that is set, and refuses values other than the one that always applies now.
tell_removed() {
  local name value always=" HOME=$PWD MPI=pmix ROUNDS=3 SEEDS=5 TABLES=runs/tables TEXT=wiki TRIES=8 END_SECONDS=120 WATCH_SECONDS=60 "
  local -A instead=([HOME]='sbatch --chdir' [INTERFACE]='NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME' [MPI]='SLURM_MPI_TYPE'
    [PREPARE_RANKS]='sbatch --ntasks-per-node' [RANKS_PER_NODE]='sbatch --ntasks-per-node' [STAGE_FOLDER]='CLOZE_STAGE'
    [TRIES]='another sbatch' [END_SECONDS]='a constant' [WATCH_SECONDS]='a constant' [SCALING]='runs/scaling-JOB'
    [MODEL]='the word --model' [RECIPE]='the word --recipe' [ROUNDS]='the word --rounds' [SCORES]='the word --out'
    [SEEDS]='the word --seeds' [TABLES]='the word --out' [TASKS]='the word --task' [TEXT]='the word --docs'
    [RUN]='the word --out, to fine-tune --model' [SHARDS]='the word --data, to prepare --out'
    [SHARES]='the word --share I/N, or an array 1-N')
  for name in "${!instead[@]}"; do
    value=CLOZE_$name
    value=${!value:-}
    [[ -z $value || $always == *" $name=$value "* ]] ||
      refuse "CLOZE_$name=$value: is no longer a variable; in its place: ${instead[$name]} (docs/cluster.md)"
    [[ -z $value ]] || say "CLOZE_$name=$value: is no longer a variable: this value always applies" >&2
  done
}

# Reads cluster/site.env, where the job's own environment does not say otherwise, and finds Python.
prepare_job() {
  local name given=() end
  for name in "${!CLOZE_@}"; do given+=("$name=${!name}"); done
  read_site
  for name in ${given[@]+"${given[@]}"}; do export "${name?}"; done
  tell_removed
  CLOZE_STORAGE_SECONDS=${CLOZE_STORAGE_SECONDS:-300}
  check_number CLOZE_STORAGE_SECONDS "$CLOZE_STORAGE_SECONDS"
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
  job=${job:-$SLURM_JOB_ID}
  # Slurm sends --signal but once to a job, however often it is started, so that programs look at the clock themselves.
  end=$(SLURM_TIME_FORMAT=%s squeue -h -j "$job" -o %e 2>/dev/null) # or N/A
  [[ ! $end =~ ^[0-9]+$ ]] || SLURM_JOB_END_TIME=$end # which may be set, and of a job in which this one was submitted
  export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-}
  settle_options
  disk=${CLOZE_STAGE:-} staged=''
  [[ $disk != 1 ]] || disk=${TMPDIR:-/tmp}
  [[ $disk != 0 ]] || disk=''
  find_python
}

# Takes the option `$2` out of `words`, those of a script, and puts its value into the variable `$1`; without it, the values
# `$3…`. `--docs`, `--task` and `--data` have all values up to the next option.
take() {
  local -n into=$1
  local word inside='' rest=()
  into=("${@:3}")
  for word in ${words[@]+"${words[@]}"}; do
    case $word in
      "$2") into=() inside=1 ;;
      "$2="*) into=("${word#*=}") inside='' ;;
      --*) inside='' rest+=("$word") ;;
      *)
        if [[ -n $inside ]]; then into+=("$word"); else rest+=("$word"); fi
        [[ $2 =~ ^--(docs|task|data)$ ]] || inside=''
        ;;
    esac
  done
  ((${#into[@]})) || refuse "$2: give a value"
  words=(${rest[@]+"${rest[@]}"})
}

# Refuses a value of `$1` that is no whole number above 0.
check_number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || refuse "$1=$2: give a whole number above 0"; }

# Removes variables of the job's options on tasks and memory that conflict with the options of our srun.
settle_options() {
  [[ -z ${SLURM_NTASKS_PER_GPU:-} ]] ||
    say "--ntasks-per-gpu=$SLURM_NTASKS_PER_GPU is not used: there is a rank for each GPU, or --ntasks-per-node=N"
  if [[ -n ${SLURM_MEM_PER_CPU:-}${SLURM_MEM_PER_GPU:-} ]]; then export SLURM_MEM_PER_NODE=0; fi # all that the job has
  unset SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU
}

# How Python is started: from a virtual environment, in an image of Apptainer, or in one of enroot through pyxis.
find_python() {
  local mounts="$PWD:$PWD${CLOZE_MOUNTS:+,$CLOZE_MOUNTS}${disk:+,$disk:$disk}"
  container=()
  case ${CLOZE_IMAGE:-} in
    '')
      python=("${CLOZE_PYTHON:-.venv/bin/python}")
      [[ -x $(command -v "${python[0]}") ]] ||
        refuse "${python[0]}: no such program; run make cluster, or set CLOZE_PYTHON or CLOZE_IMAGE in cluster/site.env"
      ;;
    *.sif) python=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$CLOZE_IMAGE" python3) ;;
    *)
      python=(python3)
      container=("--container-image=$CLOZE_IMAGE" "--container-workdir=$PWD" "--container-mounts=$mounts")
      ;;
  esac
}

# The ranks of a node that sbatch was given. Their variable may be of a job in which this one was submitted.
wanted_ranks() { scontrol show job -o "$job" 2>/dev/null | sed -n 's/.* NtasksPerN:B:S:C=\([1-9][0-9]*\):.*/\1/p'; }

# The ranks of a node: those that are wanted, or one for each of the job's GPUs there, or one alone. Slurm says `8`,
# `a100:8` or `a100:2,h100:2`.
ranks_per_node() {
  local each seen sum=0 wanted
  wanted=$(wanted_ranks)
  for each in $(tr , ' ' <<<"${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}"); do sum=$((sum + ${each##*:})); done
  if [[ $sum == 0 && -z $wanted ]] && seen=$(nvidia-smi -L 2>/dev/null | grep -c .); then
    say "Slurm gave the job no GPU, so each node has one rank; $seen are here: --ntasks-per-node=$seen takes them all" >&2
  fi
  echo "${wanted:-$((sum > 0 ? sum : 1))}"
}

# The processors that each node of the job has at least; Slurm says `72(x2),36`.
processors_per_node() {
  tr , '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -1
}

# Runs Python as a step of so many tasks on each node of the job, and waits for its end, of which it returns the code.
# A signal interrupts `wait`; the tasks hear those that Slurm sends by themselves. srun ends all tasks when one fails, and
# then has a code of those that it has ended: the first failure that it tells of is the cause.
run_step() {
  local tasks=$1 cores told listener errors step watcher looks
  shift
  cores=$(($(processors_per_node) / tasks))
  told=$(mktemp 2>/dev/null || TMPDIR=/tmp mktemp 2>/dev/null || echo /dev/null) # TMPDIR may be a login node's
  exec {errors}> >(trap '' TERM USR1 && exec sed -u -E "/^srun: error: (.*: tasks? [0-9,-]+: |Node fail|[Aa]borting, )/w $told" >&2)
  listener=$!
  CLOZE_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n') && export CLOZE_SECRET # of this step's ranks
  ${limit:-} srun --kill-on-bad-exit=1 --export=ALL "--mpi=${mpi:-none}" "--nodes=$SLURM_JOB_NUM_NODES" \
    "--ntasks=$((tasks * SLURM_JOB_NUM_NODES))" "--ntasks-per-node=$tasks" "--cpus-per-task=$((cores > 0 ? cores : 1))" \
    ${container[@]+"${container[@]}"} "$@" 2>&"$errors" {errors}>&- &
  step=$!
  exec {errors}>&-
  trap : TERM USR1
  watch_step "$step" "$told" &
  watcher=$!
  while :; do
    wait "$step"
    step_code=$?
    kill -0 "$step" 2>/dev/null || break
  done
  { kill -KILL "$watcher" && wait "$watcher"; } 2>/dev/null
  for ((looks = 0; looks < 50; looks++)); do # nor for ever: another may hold what srun has written to
    kill -0 "$listener" 2>/dev/null || break
    sleep 0.1
  done
  first_code=$(sed -nE '/: (Exited with exit code [0-9]+|Killed)$/{s/.*exit code //p;q}' "$told")
  [[ $told == /dev/null ]] || rm -f "$told"
  return $step_code
}

# Prints the exit code that this start of the run has written into the file `$1`; nothing if the run goes on, or if
# another start wrote the file.
read_code() {
  local code="/\"start\": *\"${SLURM_JOB_ID}[.]${SLURM_RESTART_COUNT:-0}\"/s/.*\"code\": *\([0-9]*\).*/\1/p"
  timeout --signal=KILL 10 sed -n "H; \$ {x; $code}" "${1:-/dev/null}" 2>/dev/null
}

# Ends an srun whose ranks have ended without its hearing of it, or that gets no ranks: a node that is cut off for a while
# tells slurmctld later that they are gone, and srun never. A slurmctld that does not answer says nothing about ranks.
# Once a rank or a node has failed, or the file `ended` says that the run is over, srun has two minutes to end: it would
# wait for ever for ranks of a node whose slurmd died and came back or whose slurmstepd died, and Slurm would list them.
watch_step() {
  local step=$1 told=$2 shown='the job has no ranks any more, and srun has not heard of it' over='' absent=0 listed
  trap '' TERM USR1
  while ((absent < 3)); do
    sleep "$WATCH_SECONDS" >/dev/null 2>&1
    if [[ -s $told || -n $(read_code "${ended:-}") ]] &&
      ((SECONDS - ${over:=$SECONDS} >= END_SECONDS)); then
      shown='the run is over, and srun does not end'
      [[ ! -s $told ]] || shown='a rank or a node has failed, and srun does not end'
      break
    fi
    listed=$(timeout 60 squeue -h -s -j "$SLURM_JOB_ID" -o %i 2>/dev/null) || continue
    if grep -q '[.][0-9]' <<<"$listed"; then absent=0; else absent=$((absent + 1)); fi
  done
  say "$shown; it is ended"
  kill -TERM "$step" # timeout hands that on
  sleep 10 >/dev/null 2>&1
  pkill -KILL -P "$step"
  kill -KILL "$step"
}

# Runs a command once on each node, outside of any image.
on_nodes() {
  local container=()
  run_step 1 "$@"
}

# The shards of an earlier start of this job; else, where the run has checkpoints, of its last start that was not refused.
earlier_shards() {
  local starts
  starts=$(grep '"event": "start"' "$1/jobs.jsonl" 2>/dev/null | grep -F "\"job\": \"$job\"")
  if [[ -z $starts && -n $(find -L "$1/checkpoints" -maxdepth 1 -name 'step-*' -print -quit 2>/dev/null) ]]; then
    starts=$(awk '/"event": "start"/ {kept = last ? last : kept; last = $0} /"event": "end".*"code": 2}/ {last = ""}
      END {print last ? last : kept}' "$1/jobs.jsonl")
  fi
  sed -n 's/.*"shards": "\(.*\)"}/\1/p' <<<"$starts" | tail -1 | sed 's/\\\(.\)/\1/g'
}

# The newest folder of finished shards.
# shellcheck disable=SC2012
newest_shards() { ls -t data/*/manifest.json 2>/dev/null | head -1 | sed 's:/manifest.json$::'; }

# Adds a line on this job to jobs.jsonl of a folder, which status.py reads.
note() {
  local folder=$1 event=$2 more=$3
  printf '{"event": "%s", "time": %(%s)T, "job": "%s", "restart": %s, %s}\n' \
    "$event" -1 "$job" "${SLURM_RESTART_COUNT:-0}" "$more" >>"$folder/jobs.jsonl"
}

# Prints the files of `had` that do not exist any more.
missing() (for path in ${had[@]+"${had[@]}"}; do [[ -e $path ]] || echo "$path"; done)

# Waits some minutes for what the job, or an earlier start of it, has seen and is gone: shared storage may come back.
await_storage() {
  local gone end=$((SECONDS + CLOZE_STORAGE_SECONDS))
  gone=$(missing)
  [[ -n $gone ]] || return 0
  say "$(paste -sd' ' <<<"$gone"): gone, or cannot be reached; waiting up to $CLOZE_STORAGE_SECONDS s for it"
  while ((SECONDS < end)); do
    sleep 1
    [[ -n $(missing) ]] || { say "it is back" && return 0; }
  done
  return 1
}

# Waits for files in the same way if this job has begun before. At the first start it does not wait: a missing file is then a
# mistake of the user.
await_earlier() {
  had=("$@")
  ((${SLURM_RESTART_COUNT:-0} == 0)) || [[ ! -e .begun/$job ]] || await_storage || refuse "$1: gone; nothing is begun anew"
}

# Refuses this job, before it writes into the folder `$1` of a run, while another job that began there still runs.
refuse_second_job() {
  local others
  others=$(awk -F'"' '$4 == "start" {begun[$10]} $4 == "end" {delete begun[$10]} END {for (other in begun) print other}' \
    "$1/jobs.jsonl" 2>/dev/null | grep -vxF "$job" | paste -sd,)
  others=${others:+$(squeue -h -j "$others" -t RUNNING -o %i 2>/dev/null | paste -sd,)}
  [[ -z $others ]] || refuse "job $others is at work in $1; wait for its end, or name another folder with --out"
}

# Notes in the folder `$1` that this job begins its work; refuses if it has begun TRIES times without progress. The files
# in `$3` (default: the folder) that match the expression `$2` are the measure of progress.
begin_in() {
  local folder=$1 expression=$2 where begun
  mkdir -p "$folder" || refuse "$folder: cannot be made"
  where=$(find -L "${3:-$folder}" -regextype egrep -regex ".*/($expression)" -printf '%f\n' 2>/dev/null | sort | awk 'END {print NR, $0}')
  begun=$(grep -c "\"event\": \"start\".*\"job\": \"$job\".*\"from\": \"$where\"" "$folder/jobs.jsonl" 2>/dev/null)
  ((begun < TRIES)) || refuse "begun $begun times in $folder, and no further than before; the log says why; another sbatch goes on"
  note "$folder" start "\"nodes\": \"$SLURM_JOB_NODELIST\", \"from\": \"$where\"${4:-}" || refuse "$folder: cannot be written"
  had=("$folder/jobs.jsonl")
  { mkdir -p .begun && : >".begun/$job"; } 2>/dev/null # not in storage that may be gone at the next start
}

# Ends the job. Its code is that of the last step, or that of the first rank that failed, or the one that the run has written
# into the file `$2`: if srun has killed ranks or was ended itself, its own code does not say why the run ended.
end_in() {
  local folder=$1 code=$step_code said
  ((code != 124)) || code=$STOPPED # of timeout
  if [[ $code != 0 && -n $first_code && ! $first_code =~ ^($STOPPED|$LOST)$ ]] && ((first_code < 128)); then
    ((code == first_code)) || say "a rank has failed with $first_code, whereupon srun ended the others ($code)"
    code=$first_code
  elif [[ ! $code =~ ^(2|$STOPPED|$LOST)$ ]]; then
    said=$(read_code "${2:-}")
    code=${said:-$((code > 128 ? LOST : code))}
  fi
  [[ $code =~ ^(0|$STOPPED|$LOST)$ || -z $(missing) ]] || { await_storage && code=$LOST; }
  note "$folder" end "\"code\": $code" || say "$folder: cannot be written, so jobs.jsonl there lacks this end: $code"
  if [[ -n $staged && $code != "$LOST" ]]; then # beside a step that Slurm still lists: its slurmstepd was killed
    SLURM_OVERLAP=1 limit='timeout 300' on_nodes rm -rf "$staged"
  fi
  if [[ $code == "$STOPPED" || $code == "$LOST" ]]; then requeue "$folder"; fi
  exit "$code"
}

# Puts this job back into the queue, for other nodes than those that were found to be bad. It leaves alone a job that
# somebody has cancelled, and one that Slurm has begun again elsewhere while this node was cut off.
requeue() {
  local bad=$1/preflight/exclude shown
  until shown=$(scontrol show job -o "$job" 2>&1); do
    [[ $shown != *"Invalid job id"* ]] || return
    sleep 10 # until slurmctld can be reached again
  done
  if [[ $shown != *" JobState=RUNNING "* || $shown != *" Restarts=${SLURM_RESTART_COUNT:-0} "* ]]; then
    say "not put back into the queue: the job was ended, or begun again, from outside"
    return
  fi
  trap '' TERM # Slurm ends what runs of a job that goes back
  say "back into the queue"
  scontrol requeue "$job" || return
  if [[ -s $bad ]]; then
    say "without $(paste -sd, "$bad")"
    bad=$(sed -n 's/.* ExcNodeList=\([^ (]*\) .*/\1,/p' <<<"$shown")$(paste -sd, "$bad")
    scontrol update "JobId=$job" "ExcNodeList=$bad"
    say "where it waits for want of nodes: scontrol update JobId=$job ExcNodeList= lets it use all again"
  fi
}

# Copies the shards, without the documents beside them, to a folder of this user alone on each node's own disk where they
# fit, and says in `staged` where they are. A copy that an earlier start left is taken where it is one of these shards.
stage() {
  staged=$disk/cloze-$SLURM_JOB_ID
  # shellcheck disable=SC2016
  on_nodes bash -c '
    set -o pipefail
    found=$(stat -c %u:%a "$2" 2>/dev/null || echo "$EUID:")
    if [[ $found != "$EUID":* ]]; then echo "$(hostname): $2: of another user; the shards are read from $1" && exit 1; fi
    if [[ $found == *700 ]] && cmp -s "$1/manifest.json" "$2/manifest.json"; then exit 0; fi
    rm -rf "$2" "$2".??????
    needed=$(du -skL --exclude=documents "$1" | cut -f1) free=$(df -k --output=avail "$(dirname "$2")" | tail -1)
    if ((free > needed + needed / 20)) && part=$(mktemp -d "$2.XXXXXX") && tar -C "$1" --exclude=./documents -cf - . |
      tar -C "$part" --no-overwrite-dir --no-same-owner -xf - && mv -T "$part" "$2"; then exit 0; fi
    echo "$(hostname): no room for $((needed >> 10)) MB in $(dirname "$2"); the shards are read from $1"
    rm -rf "$2".??????; ln -snT "$(realpath "$1")" "$2"' stage "$shards" "$staged" && return
  on_nodes find "$disk" -maxdepth 1 -name "${staged##*/}" -uid "$EUID" -exec rm -rf {} +
  staged=''
}

# Makes shards of text in an MPI rank for each processor of the job; words go to shard.py.
prepare() {
  local words=("$@") text=() shards notes now left limit='' ranks docs=()
  [[ " $* " == *' --from '* && " $* " != *' --docs'* ]] || take text --docs wiki
  ((${#text[@]} == 0)) || docs=(--docs "${text[@]}")
  [[ ${#text[@]} != 1 || ${text[0]} == demo || ${text[0]} == *[=*?]* || -e ${text[0]} ]] ||
    refuse "--docs ${text[0]}: no such file or folder"
  [[ ${#text[@]} == 1 || " $* " == *' --out'* ]] || refuse "name the folder of the shards: --out"
  take shards --out "data/$(basename "${text[0]-}")"
  notes=$(dirname "$shards")/.jobs/$(basename "$shards") # shard.py wants its folder for itself
  say "text ${text[*]-}, shards $shards, on $SLURM_JOB_NODELIST"
  begin_in "$notes" '.*' "$shards"
  printf -v now '%(%s)T' -1
  left=$((${SLURM_JOB_END_TIME:-0} - now - 60))
  if [[ -n $SLURM_JOB_END_TIME ]]; then limit="timeout --signal=TERM $((left > 1 ? left : 1))"; fi
  ranks=$(wanted_ranks) words=(${docs[@]+"${docs[@]}"} --out "$shards" ${words[@]+"${words[@]}"})
  mpi=${SLURM_MPI_TYPE:-pmix} run_step "${ranks:-$(processors_per_node)}" "${python[@]}" data_prep/shard.py "${words[@]}"
  end_in "$notes"
}

# Trains through all phases, by the recipe `$1` unless the words have one; they go to train.py.
pretrain() {
  local words=("${@:2}") recipe run ranks each manifests chosen=''
  take recipe --recipe "$1"
  take run --out "runs/$(basename "$recipe" .toml)"
  await_earlier "$run/jobs.jsonl"
  take shards --data ''
  [[ -n $shards ]] || shards=$(earlier_shards "$run") chosen=', as at an earlier start'
  [[ ! $shards =~ ^[A-Za-z0-9_]+=.*\ [A-Za-z0-9_]+= ]] || mapfile -t shards < <(sed -E 's/ (\w+=)/\n\1/g' <<<"$shards")
  [[ -n ${shards[0]} ]] || shards=("$(newest_shards)") chosen=', the newest'
  manifests=("${shards[@]/%//manifest.json}")
  [[ -e ${manifests[0]} ]] || manifests=("${manifests[@]#*=}") # of NAME=FOLDER
  await_earlier ${shards:+"${manifests[@]}"}
  [[ -n ${shards[0]} ]] || refuse "no finished shards under data/; make some, with sbatch cluster/prepare.slurm, or name --data"
  for each in "${manifests[@]%/manifest.json}"; do
    [[ -e $each/manifest.json ]] || refuse "--data $each: no finished shards; it is the folder that shard.py made"
  done
  ranks=$(ranks_per_node)
  say "recipe $recipe, shards ${shards[*]}$chosen, run $run, $ranks ranks on each of $SLURM_JOB_NODELIST"
  refuse_second_job "$run"
  export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)}"
  # shellcheck disable=SC2001
  begin_in "$run" 'step-[0-9]+' '' ", \"shards\": \"$(sed 's/["\\]/\\&/g' <<<"${shards[*]}")\""
  had+=("${manifests[@]}")
  export CLOZE_STORAGE_SECONDS # what was seen here, the ranks wait for too
  words=(--recipe "$recipe" --out "$run" ${words[@]+"${words[@]}"})
  if [[ ${CLOZE_PREFLIGHT:-1} == 1 ]]; then
    run_step "$ranks" "${python[@]}" cluster/preflight.py --data "${shards[@]}" "${words[@]}" || end_in "$run"
  fi
  if [[ -n $disk && -e $shards/manifest.json ]]; then stage; fi # several corpora are read where they lie
  if [[ -n $staged ]]; then shards=("$staged"); fi
  ended=$run/ended.json run_step "$ranks" "${python[@]}" pretraining/train.py --data "${shards[@]}" "${words[@]}"
  end_in "$run" "$run/ended.json"
}

# Measures training steps on 1, 2, 4 … nodes up to all of the job, which take turns, and reports.
scale() {
  local words=("$@") folder=runs/scaling-$SLURM_JOB_ID ranks counts=() nodes round rounds
  take rounds --rounds 3
  check_number --rounds "$rounds"
  words=(benchmarks/scaling.py --notes "$folder/notes.jsonl" ${words[@]+"${words[@]}"})
  mkdir -p "$folder" || refuse "$folder: cannot be made"
  rm -f "$folder/notes.jsonl" # of an earlier start, whose rounds did not alternate with these
  ranks=$(ranks_per_node)
  for ((nodes = 1; nodes < SLURM_JOB_NUM_NODES; nodes *= 2)); do counts+=("$nodes"); done
  counts+=("$SLURM_JOB_NUM_NODES")
  say "$ranks ranks on each of ${counts[*]} nodes, in turns, of $SLURM_JOB_NODELIST; what is found goes to $folder"
  for ((round = 0; round < rounds; round++)); do
    for nodes in "${counts[@]}"; do
      SLURM_JOB_NUM_NODES=$nodes run_step "$ranks" "${python[@]}" "${words[@]}" || exit $step_code
    done
  done
  SLURM_JOB_NUM_NODES=1 run_step 1 "${python[@]}" "${words[@]}" --out "$folder/scaling.json"
  exit $step_code
}

# Makes a table of the paper: in an array this element's share of the runs, otherwise all that is left.
reproduce() {
  local words=("$@") folder notes share=()
  take folder --out runs/tables
  notes=$folder/jobs/$(tr -c 'A-Za-z0-9\n' - <<<"${words[*]-}")${SLURM_ARRAY_TASK_ID:-}
  if [[ -n ${SLURM_ARRAY_TASK_ID:-} && "${words[*]-}" != *--share* ]]; then share=(--share "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_MAX"); fi
  say "tables in $folder, ${share[*]:-all that is left}"
  begin_in "$notes" '.*(step-[0-9]+|[a-z0-9-]+\.json)' "$folder"
  words=(--out "$folder" ${share[@]+"${share[@]}"} ${words[@]+"${words[@]}"})
  run_step 1 "${python[@]}" benchmarks/reproduce.py "${words[@]}"
  end_in "$notes"
}

# The command that fine-tunes on a task, as `command`: tasks of GLUE have one in common.
find_command() {
  case $1 in
    squad | swag | ner) command=("finetuning/run_$1.py" --out "$scores/$1") ;;
    *) command=(finetuning/run_glue.py --out "$scores/glue" --task "$1") ;;
  esac
}

# What is fine-tuned: the model, the tasks, how many seeds each has, and the folder for the scores.
read_tasks() {
  declare -g model scores tasks seeds
  take model --model runs/bert_large_lamb
  scores=$model
  if [[ $model != runs/* && ! -e $model/config.json && ! -d $model/checkpoints ]]; then
    scores=runs/${model//\//-} # of a model on the hub, which has no folder here
  fi
  take scores --out "$scores"
  take tasks --task cola sst2 mrpc qqp stsb mnli qnli rte wnli
  take seeds --seeds 5
  [[ $seeds =~ ^[1-9][0-9]*$ ]] || refuse "--seeds $seeds: give a whole number above 0"
  words=(--model "$model" ${words[@]+"${words[@]}"})
}

# Fine-tunes on the task and with the seed that this element of the array stands for; words go to its command.
finetune() {
  local words=("$@") task seed command
  read_tasks
  ((SLURM_ARRAY_TASK_ID < ${#tasks[@]} * seeds)) || { say "nothing to do: ${#tasks[@]} tasks, $seeds seeds" && exit 0; }
  task=${tasks[SLURM_ARRAY_TASK_ID / seeds]} seed=$((SLURM_ARRAY_TASK_ID % seeds + 1))
  say "task $task, seed $seed, model $model"
  find_command "$task"
  begin_in "$scores/jobs/$task-seed$seed" ".*/${task}[^/]*/.*seed$seed/.*(step-[0-9]+|results.json)" "$scores"
  run_step 1 "${python[@]}" "${command[@]}" --share --seeds 1 --seed "$seed" "${words[@]}"
  end_in "$scores/jobs/$task-seed$seed"
}

# Chooses the best of all seeds of every task, and prints the tables; trains missing runs. Tasks of GLUE go together; what
# one command says does not keep the others from theirs.
gather() {
  local words=("$@") task of_glue=() command worst=0
  read_tasks
  begin_in "$scores/jobs/gather" '.*(step-[0-9]+|results.json)' "$scores"
  for task in "${tasks[@]}"; do
    find_command "$task"
    if [[ ${command[0]} == *run_glue.py ]]; then of_glue+=("$task") && continue; fi
    run_step 1 "${python[@]}" "${command[@]}" --seeds "$seeds" "${words[@]}"
    worst=$((step_code > worst ? step_code : worst))
  done
  if ((${#of_glue[@]})); then
    find_command "${of_glue[0]}"
    run_step 1 "${python[@]}" "${command[@]}" "${of_glue[@]:1}" --seeds "$seeds" "${words[@]}"
    worst=$((step_code > worst ? step_code : worst))
  fi
  step_code=$worst first_code='' # of several steps
  end_in "$scores/jobs/gather"
}

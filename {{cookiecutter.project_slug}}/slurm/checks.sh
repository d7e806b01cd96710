# shellcheck shell=bash disable=SC2153
# Shared by submit.sh, before a job is submitted, and job.sh: what would end it at its start. The caller defines `fail`.

# Print the value of the last `--NAME VALUE` or `--NAME=VALUE` in options; fail if there is none.
option() { # NAME OPTION …
    local name=$1 found='' is_there=1
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            "$name") is_there=0 found=${2-} ;;
            "$name="*) is_there=0 found=${1#*=} ;;
        esac
        shift
    done
    printf %s "$found"
    return "$is_there"
}

# Unset SLURM's variables of this job, which do not apply to another one.
leave_job() {
    local name
    [ -n "${SLURM_JOB_ID-}" ] || return 0
    for name in "${!SLURM_@}"; do [[ $name == SLURM_@(CONF|CLUSTERS|JWT) ]] || unset "$name"; done
}

# Train the code of this project, not what an image has in /app/src, or what a copy of the project has installed in VENV.
use_own_packages() {
    if [ "$CONTAINER" != none ]; then PYTHONPATH=; fi
    export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
    export APPTAINERENV_PYTHONPATH=$PYTHONPATH SINGULARITYENV_PYTHONPATH=$PYTHONPATH
}

check_venv() {
    if [ "$CONTAINER" != none ] || [ -x "$VENV/bin/python" ]; then return; fi
    fail "there is no $VENV/bin/python in $PWD; \`make setup\`, or set VENV (slurm/settings.sh)"
}

# Prepare the environment of the ranks on this host, and set `python` to how it is called.
find_python() {
    set +u # scripts of modules and conda read variables that are not set
    prepare < /dev/null || fail "\`prepare\` in slurm/settings.sh has failed on ${SLURMD_NODENAME-$HOSTNAME}"
    set -u
    check_venv
    use_own_packages
    case $CONTAINER in
        none) python=("$VENV/bin/python") ;;
        apptainer)
            python=(apptainer exec --bind "$PWD${MOUNTS:+,$MOUNTS}" --pwd "$PWD")
            # The GPU driver comes from the host.
            if [ -n "${SLURM_GPUS_ON_NODE-}" ] || { [ -z "${SLURM_JOB_ID-}" ] && [ -e /dev/nvidiactl ]; }; then python+=(--nv); fi
            python+=("$IMAGE" python)
            ;;
        pyxis)
            [ -n "${SLURM_JOB_ID-}" ] || fail "CONTAINER=pyxis cannot be used without a scheduler; use none or apptainer"
            srun_options+=(--container-image="$IMAGE" --container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD")
            srun_options+=(--container-env=PYTHONPATH) # or the image's would replace it
            python=(python)
            ;;
        *) fail "CONTAINER=$CONTAINER is unknown; use none, apptainer or pyxis" ;;
    esac
}

# A job with GPUs trains on them, unless an option or its config says otherwise.
check_torch() { # OPTION of fit …
    local accelerator files=() previous='' version word
    for word in "$@"; do
        if [ "$previous" = --config ]; then files+=("$word"); fi
        if [[ $word == --config=* ]]; then files+=("${word#*=}"); fi
        previous=$word
    done
    if [ -z "${files[*]-}" ]; then files=("$CONFIG"); fi
    accelerator=$(option --trainer.accelerator "$@") || # the last one that is no comment
        accelerator=$(sed -n 's/^\([^#]*[ {,]\)\?accelerator: *["'\'']\?\([a-z]*\).*/\2/p' "${files[@]}" 2> /dev/null | tail -n 1)
    # --trainer.gpus names devices in an older way.
    if [ "$CONTAINER" != none ] || option --trainer.gpus "$@" > /dev/null || [[ $accelerator != @(|gpu|cuda) ]]; then return; fi
    version=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2> /dev/null)
    [[ $version != *+cpu ]] ||
        fail "the job asks for GPUs, and torch $version in $VENV is a CPU build: \`make setup VARIANT=cuda\`, or --trainer.accelerator cpu"
}

# The options of `fit` can be read, as far as this machine knows.
check_options() { # OPTION of fit …
    local said code=0 config=(--config "$CONFIG") # other errors than 2 may be of this machine
    if [ "$CONTAINER" != none ] || [ "${1-}" = reproduce ]; then return; fi
    if option --config "$@" > /dev/null; then config=(); fi
    if option --trainer.run_name "$@" > /dev/null; then config+=(--trainer.resume auto); fi # as in the job
    use_own_packages
    said=$("$VENV/bin/python" -m "$PACKAGE" fit "${config[@]}" "$@" --print_config 2>&1 > /dev/null < /dev/null) || code=$?
    if [ "$code" = 2 ]; then fail "fit refuses its options: $said"; fi
}

# The same for each line of a file of options (sweep.sh), but for its model, in one process: there may be 1,000.
check_lines() { # OPTION of fit …
    local said code=0
    if [ "$CONTAINER" != none ] || [ "${1-}" = reproduce ]; then return; fi
    use_own_packages
    said=$("$VENV/bin/python" -c "
import sys
from ${PACKAGE}_trainer import errors
from ${PACKAGE}_trainer.cli import configuration
from ${PACKAGE}_trainer.run import plan
folder, config, *common = sys.argv[1:]
for count, line in enumerate(open(folder + '/lines'), 1):
    words = ['--trainer.run_name=job-0', '--trainer.resume=auto', *common, *open(f'{folder}/{count}').read().split('\n')[:-1]]
    if not any(word.partition('=')[0] == '--config' for word in words):
        words = ['--config', config, *words]
    problems = errors.Problems()
    try:
        with configuration.read_sections('', 'fit', words, problems) as checked:
            problems.raise_any()
            plan.make_elsewhere(checked.trainer)
    except errors.UserError as error:
        print(line.strip(), *error.problems, sep=': ', file=sys.stderr)
        sys.exit(2)
" "$SWEEP_PLAN" "$CONFIG" "$@" 2>&1 > /dev/null < /dev/null) || code=$?
    if [ "$code" = 2 ]; then fail "$said"; fi
}

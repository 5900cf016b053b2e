#!/bin/sh
# PostgreSQL as the official image starts it, for a machine that cannot pull that image: the same
# variables, the same folder. Used by docker/test.sh alone.
set -eu
data=/var/lib/postgresql/data
bin="$(echo /usr/lib/postgresql/*/bin)"
mkdir -p "$data"
chown postgres:postgres "$data"
chmod 0700 "$data"
as_postgres() { setpriv --reuid postgres --regid postgres --clear-groups "$@"; }
if [ ! -f "$data/PG_VERSION" ]; then
  printf '%s' "$POSTGRES_PASSWORD" >/tmp/password
  chown postgres /tmp/password
  as_postgres "$bin/initdb" -D "$data" -U "$POSTGRES_USER" --pwfile /tmp/password -A scram-sha-256 \
    -E UTF8 --locale=C.UTF-8 --no-instructions
  rm /tmp/password
  echo "host all all all scram-sha-256" >>"$data/pg_hba.conf"
  echo "create database \"$POSTGRES_DB\"" | as_postgres "$bin/postgres" --single -D "$data" postgres
fi
exec setpriv --reuid postgres --regid postgres --clear-groups "$bin/postgres" -D "$data" -c listen_addresses='*'

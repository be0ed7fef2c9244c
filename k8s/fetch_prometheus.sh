#!/bin/sh
# fetch_prometheus.sh FOLDER: Debian's prometheus and promtool into FOLDER/usr/bin, without installing anything. Where this
# machine has no package lists they are fetched into FOLDER too, so no root is needed.
set -eu
folder=$1
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
folder=$(cd "$folder" && pwd)
cd "$folder"
download() { apt-get -q "$@" -o APT::Sandbox::User="$(id -un)" download prometheus; }
rm -f prometheus_*.deb
if ! download; then
	own="-o Dir::State::Lists=$folder/lists -o Dir::Cache=$folder/cache -o APT::Sandbox::User=$(id -un)"
	apt-get -q $own update
	download $own
fi
dpkg-deb -x prometheus_*.deb .
rm -rf lists cache prometheus_*.deb
"$folder/usr/bin/prometheus" --version | head -n 1

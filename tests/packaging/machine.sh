#!/usr/bin/env bash
# A machine with another release of Debian, and the suite in it: `make test-machine RELEASE=trixie`, as root.
#
# Its root folder is MACHINES/RELEASE, made by debootstrap the first time. The suite is that of HEAD, in a clone: nothing
# else of this tree is taken. /tmp is a tmpfs of 2 GiB. Variables, which make passes on:
#   RELEASE     trixie (Debian 13), sid (the newest compilers and Python), ...
#   ORDINARY=1  as an ordinary user instead of root, in a folder whose path has a space
#   BARE=1      as in a container, after the installation: an ordinary user, no compiler, a home that is read-only, no network.
#               The first part of the tests runs; what needs a compiler is skipped, and the reason is said
#   TARGET      what make does there (default: test)
#   MACHINES    the folder of the root folders and of pip's downloads (default: .machines); some 10 GB a release
#   MIRROR      Debian's packages (default: debootstrap's)
# All mounts and processes are in namespaces of their own, which end with this script, however it ends.
set -euo pipefail

refused() {
  echo "error: $1" >&2
  exit 2
}

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
release=${RELEASE:-}
machines=$(realpath -m "${MACHINES:-$tree/.machines}")
root=$machines/$release
least_kib=$((12 << 20))
needed=python3,python3-venv,python3-dev,g++,make,git,ca-certificates # and nothing else: a minimal system

check() {
  [ -n "$release" ] || refused "expected a release of Debian, found none: make test-machine RELEASE=trixie"
  [ "$(id -u)" = 0 ] || refused "expected root, which may mount and chroot, found user $(id -u); run it with sudo"
  command -v debootstrap >/dev/null || refused "expected debootstrap, found none; apt install debootstrap"
  mkdir -p "$machines"
  unshare --mount --pid --fork --kill-child --propagation private \
    sh -c 'mount -t tmpfs tmpfs "$1" && chroot / true' - "$machines" 2>/dev/null ||
    refused "expected to be allowed to mount and chroot, found that this machine forbids it; run it outside the container"
  local free_kib
  free_kib=$(df --output=avail "$machines" | tail -1)
  [ -d "$root" ] || [ "$free_kib" -ge $least_kib ] ||
    refused "expected $((least_kib >> 20)) GiB free in $machines, found $((free_kib >> 20)); name another: MACHINES=folder"
}

make_root() {
  [ -x "$root/usr/bin/python3" ] && [ ! -d "$root/debootstrap" ] && return
  echo "Making $root (some minutes)."
  debootstrap --variant=minbase --include="$needed" "$release" "$root" ${MIRROR:+"$MIRROR"} >"$machines/$release.log" 2>&1 ||
    refused "debootstrap could not make $root; its last line: $(tail -1 "$machines/$release.log")"
}

# Within the namespaces.
mount_all() {
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --rbind /sys "$root/sys"
  mount -t tmpfs -o size=2g,mode=1777 tmpfs "$root/tmp"
  mkdir -p "$machines/pip" "$root/var/cache/pip"
  mount --bind "$machines/pip" "$root/var/cache/pip"
  cp --dereference --remove-destination /etc/resolv.conf "$root/etc/resolv.conf"
  printf '127.0.0.1 localhost %s\n::1 localhost\n' "$(hostname)" >"$root/etc/hosts"
  local trusted=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
  [ ! -f "$trusted" ] || mount --bind "$trusted" "$root$certificates"
}

certificates=/etc/ssl/certs/ca-certificates.crt

clone() {
  local folder=$root$1
  if [ -d "$folder/.git" ]; then # its environment is used again
    git -C "$folder" fetch --quiet "$tree" HEAD
    git -C "$folder" reset --quiet --hard FETCH_HEAD
    git -C "$folder" clean --quiet -fd
  else
    mkdir -p "$(dirname "$folder")"
    git clone --quiet "$tree" "$folder"
  fi
}

run() {
  local user=root home=/root folder
  if [ -n "${ORDINARY:-}${BARE:-}" ]; then
    user=ordinary home=/home/ordinary
    chroot "$root" id "$user" >/dev/null 2>&1 || chroot "$root" useradd --create-home "$user"
  fi
  folder="$home/a path/poochplan"
  export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
  clone "$folder"
  chroot "$root" chown -R --no-dereference "$user:" /var/cache/pip "$(dirname "$folder")"
  local kept=("HOME=$home" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PIP_CACHE_DIR=/var/cache/pip)
  kept+=("PIP_CERT=$certificates" "SSL_CERT_FILE=$certificates" "REQUESTS_CA_BUNDLE=$certificates")
  local name
  for name in http_proxy https_proxy no_proxy PIP_INDEX_URL PIP_DEFAULT_TIMEOUT PYTEST_ADDOPTS POOCH_PART POOCH_DAY ALL DEEP VERSION; do
    [ -z "${!name:-}" ] || kept+=("$name=${!name}")
  done
  within() { chroot --userspec="$user:$user" "$root" env -i "${kept[@]}" "$@"; }
  echo "$release as $user: $(within python3 --version), $(within g++ --version | head -1), commit $(git -C "$tree" rev-parse --short HEAD)"
  [ -z "${BARE:-}" ] || {
    within make -C "$folder" setup
    take_away "$root$home"
    unshare --net chroot "$root" python3 -c "$loopback"' os.execvp(sys.argv[1], sys.argv[1:])' \
      setpriv --reuid "$user" --regid "$user" --init-groups --no-new-privs env -i "${kept[@]}" PYTHONDONTWRITEBYTECODE=1 POOCH_PART=first OMP_NUM_THREADS=1 \
      sh -c 'cd "$0" && exec .venv/bin/pytest -p no:cacheprovider --numprocesses=2 --dist=worksteal -rs tests' "$folder"
    return
  }
  within make -C "$folder" "${TARGET:-test}"
}

# A network of its own has no other interface, and this one is down.
loopback='import fcntl, os, socket, struct, sys; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 1));'

take_away() {
  find "$root"/usr/bin "$root"/usr/lib/llvm-*/bin -type f \
    \( -name "*g++*" -o -name "*gcc*" -o -name "*cpp*" -o -name "clang*" \) -exec mount --bind /dev/null {} \; 2>/dev/null || true
  ! chroot "$root" sh -c "c++ --version || g++ --version || clang++ --version" >/dev/null 2>&1 ||
    refused "expected that no compiler is left, found one; see take_away"
  mkdir -p "$1/.cache"
  mount --bind "$1" "$1"
  mount -o remount,bind,ro "$1"
  mount -t tmpfs -o ro,mode=755 tmpfs "$1/.cache" # behind the bind, which would hide it: nothing that was built before
}

if [ "${1:-}" = within ]; then
  mount_all
  run
else
  check
  make_root
  [ -z "$(git -C "$tree" status --porcelain)" ] || echo "Changes that are not committed are left out."
  unshare --mount --pid --fork --kill-child --propagation private "${BASH_SOURCE[0]}" within
fi

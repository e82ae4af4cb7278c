#!/usr/bin/env bash
# Prints a software bill of materials of a program in SPDX 2.3 (JSON): the program, with its checksum, and the packages
# that own the shared libraries that it loads at start and the headers that are compiled into it, with their versions and
# licences.
#
#   scripts/sbom.sh [PROGRAM] >nrl-train.spdx.json
#
# PROGRAM: default build/cpu/bin/nrl-train. SOURCE_DATE_EPOCH: the date of the document; default: that of the commit.
# Needs dpkg (Debian, Ubuntu) and jq. Exit codes: 64 usage, 66 no such program, 69 something is not installed.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($# <= 1)) || die 64 "usage: scripts/sbom.sh [PROGRAM]"
program=${1:-$root_dir/build/cpu/bin/nrl-train}
[[ -f $program ]] || die 66 "$program: no such file. Fix: build nrl-train, or name the program"
for tool in dpkg-query jq ldd sha256sum; do
  command -v "$tool" >/dev/null || die 69 "$tool is not installed"
done
# Libraries that exist as headers only (third_party/CMakeLists.txt).
headers=(libcli11-dev nlohmann-json3-dev libprotozero-dev libspdlog-dev)

version=$(sed -nE 's/^project\(nrl_train VERSION ([0-9.]+).*/\1/p' "$root_dir/CMakeLists.txt")
epoch=${SOURCE_DATE_EPOCH:-$(git -C "$root_dir" log -1 --format=%ct 2>/dev/null || echo 0)}
sum=$(sha256sum <"$program" | cut -d ' ' -f 1)

# The package of each library. Where / is merged with /usr, dpkg may know a file under either name.
owners() {
  local path
  ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }' | sort -u | while read -r path; do
    dpkg-query -S "$path" 2>/dev/null || dpkg-query -S "$(realpath "$path")" 2>/dev/null ||
      dpkg-query -S "/usr$path" 2>/dev/null || echo "unknown: $path"
  done | sed -E 's/^diversion .*//; /^$/d' | cut -d ' ' -f 1 | sed 's/:$//' | sort -u
}

# licence PACKAGE: that of most of its files ("Files: *" of a machine-readable copyright file) as an SPDX expression, if
# all names in it are known.
licence() {
  awk '
    BEGIN {
      n = split("Apache-2.0 Apache-2.0 BSD-2-clause BSD-2-Clause BSD-2-Clause BSD-2-Clause BSD-3-clause BSD-3-Clause " \
        "BSD-3-Clause BSD-3-Clause Expat MIT MIT MIT ISC ISC Zlib Zlib zlib Zlib GPL-2 GPL-2.0-only GPL-2+ GPL-2.0-or-later " \
        "GPL-3 GPL-3.0-only GPL-3+ GPL-3.0-or-later LGPL-2.1 LGPL-2.1-only LGPL-2.1+ LGPL-2.1-or-later LGPL-2+ " \
        "LGPL-2.0-or-later LGPL-3+ LGPL-3.0-or-later BSL-1.0 BSL-1.0 Boost-1.0 BSL-1.0 CC0-1.0 CC0-1.0 and AND or OR", names, " ")
      for (i = 1; i < n; i += 2) spdx[names[i]] = names[i + 1]
    }
    /^Files:/ { all = $2 == "*" && NF == 2 }
    all && /^License:/ {
      for (i = 2; i <= NF; ++i) {
        if (!($i in spdx)) exit
        text = text (i > 2 ? " " : "") spdx[$i]
      }
      found = 1
      exit
    }
    END { print found ? text : "NOASSERTION" }' "/usr/share/doc/$1/copyright" 2>/dev/null || echo NOASSERTION
}

packages() {
  local package
  owners | while read -r package; do
    [[ $package != unknown ]] || die 69 "a library of $program belongs to no package"
    dpkg-query -W -f="shared\t\${Package}\t\${Version}\t\${Architecture}\t\${source:Package}\t\${Homepage}\t$(licence "$package")\n" "$package"
  done
  for package in "${headers[@]}"; do
    dpkg-query -W -f="header\t\${Package}\t\${Version}\t\${Architecture}\t\${source:Package}\t\${Homepage}\t$(licence "$package")\n" "$package" 2>/dev/null ||
      die 69 "$package is not installed. Fix: scripts/install-deps.sh"
  done
}

distribution=$(. /etc/os-release && echo "$ID")
list=$(packages)
jq -nS --arg list "$list" --arg version "$version" --arg sum "$sum" --arg distribution "$distribution" \
  --arg created "$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)" --arg name "$(basename "$program")" '
  def known: if . == "" or . == "unknown" then "NOASSERTION" else . end;
  ($list | split("\n") | map(split("\t") | {kind: .[0], package: .[1], version: .[2], architecture: .[3], source: .[4],
    home: .[5], license: .[6], id: ("SPDXRef-Package-" + (.[1] | gsub("[^A-Za-z0-9.-]"; "-")))}) | unique_by(.id)) as $p
  | {spdxVersion: "SPDX-2.3", dataLicense: "CC0-1.0", SPDXID: "SPDXRef-DOCUMENT", name: ($name + "-" + $version),
     documentNamespace: ("https://spdx.org/spdxdocs/" + $name + "-" + $version + "-" + $sum),
     creationInfo: {created: $created, creators: ["Tool: nrl-train-scripts-sbom.sh"]},
     documentDescribes: ["SPDXRef-Program"],
     packages: ([{SPDXID: "SPDXRef-Program", name: $name, versionInfo: $version, downloadLocation: "NOASSERTION",
        filesAnalyzed: false, primaryPackagePurpose: "APPLICATION", licenseConcluded: "NOASSERTION",
        licenseDeclared: "NOASSERTION", copyrightText: "NOASSERTION",
        checksums: [{algorithm: "SHA256", checksumValue: $sum}]}]
      + ($p | map({SPDXID: .id, name: .package, versionInfo: .version, downloadLocation: "NOASSERTION",
        filesAnalyzed: false, primaryPackagePurpose: "LIBRARY", homepage: (.home | known),
        sourceInfo: ("built from the source package " + .source), licenseConcluded: "NOASSERTION",
        licenseDeclared: .license, copyrightText: "NOASSERTION",
        externalRefs: [{referenceCategory: "PACKAGE-MANAGER", referenceType: "purl",
          referenceLocator: ("pkg:deb/" + $distribution + "/" + .package + "@" + (.version | @uri) + "?arch=" + .architecture)}]}))),
     relationships: ([{spdxElementId: "SPDXRef-DOCUMENT", relationshipType: "DESCRIBES", relatedSpdxElement: "SPDXRef-Program"}]
      + ($p | map({spdxElementId: "SPDXRef-Program",
        relationshipType: (if .kind == "header" then "STATIC_LINK" else "DYNAMIC_LINK" end), relatedSpdxElement: .id})))}'

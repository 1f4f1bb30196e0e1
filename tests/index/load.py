"""Load on a served index, by wrk on loopback: the 95th percentile of the time to an answer, and CPU time an answer.

    python -m nibblas.index.synthetic 100000 synthetic.parquet
    nibblas index add synthetic.parquet --db synthetic.sqlite --terms MIT
    python tests/index/load.py synthetic.sqlite

Searches are made at random of words, filters and orders, implementations are drawn from all; --addresses says how many
of each there are, so many that hardly any answer is asked for twice. --pause is how long a reader waits after an
answer; without one the readers take all the time there is, and an answer takes their number over the answers a second.
"""

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

from nibblas.index.catalog import Catalog

SCRIPT = """
local addresses = {}
for line in io.lines("%s") do addresses[#addresses + 1] = line end
local threads = 0
function setup(thread) threads = threads + 1; thread:set("seed", threads) end
function init() math.randomseed(seed) end
%s
function request() return wrk.format("GET", addresses[math.random(#addresses)]) end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %%d %%d %%d %%d %%d %%d\\n", summary.requests, latency:percentile(50),
    latency:percentile(95), latency:percentile(99), latency.max, e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def addresses(path: Path, count: int) -> dict[str, list[str]]:
    """Made-up requests of each kind to the index in a file."""
    draw = random.Random(1)
    with Catalog(path) as catalog:
        slugs = [row["slug"] for row in catalog.all("SELECT slug FROM implementation WHERE current")]
        authors = [row["name"] for row in catalog.all("SELECT name FROM author")]
        selection = catalog.prepared.selection
        values = {name: list(selection.facet(name).places) for name in ("operation", "language", "framework", "uses")}
    words = [word for slug in draw.sample(slugs, min(len(slugs), 500)) for word in slug.split("-")] + authors

    def query() -> str:
        found = {"q": " ".join(draw.sample(words, draw.choice((0, 1, 1, 2))))}
        for name in draw.sample(sorted(values), draw.choice((0, 1, 2))):
            found |= {name: draw.choice(values[name])} if values[name] else {}
        found |= {"sort": draw.choice(("evidence", "newest", "name"))}
        return urlencode(found)

    return {
        "search": [f"/api/v1/implementations?{query()}" for _ in range(count)],
        "search page": [f"/search?{query()}" for _ in range(count)],
        "implementation": [f"/api/v1/implementations/{draw.choice(slugs)}" for _ in range(count)],
        "implementation page": [f"/implementations/{draw.choice(slugs)}" for _ in range(count)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("db", type=Path)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--addresses", type=int, default=20_000)
    parser.add_argument("--pause", type=int, default=100, help="milliseconds")
    given = parser.parse_args()
    requests = addresses(given.db, given.addresses)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nibblas", "index", "serve", "--db", str(given.db), "--port", str(port)]
    server = subprocess.Popen([*command, "--workers", str(given.workers)])
    try:
        base = f"http://127.0.0.1:{port}"
        warm(base, [address for of in requests.values() for address in of[:50]])
        print("requests            p50 ms  p95 ms  p99 ms  max ms  answers/s  CPU ms  failed")
        for kind, of in requests.items():
            before = cpu_seconds(server.pid)
            count, p50, p95, p99, most, failed = wrk(base, of, given)
            used = 1e3 * (cpu_seconds(server.pid) - before) / max(count, 1)
            times = "  ".join(f"{us / 1e3:6.1f}" for us in (p50, p95, p99, most))
            print(f"{kind:<18}  {times}  {count / given.seconds:9.0f}  {used:6.2f}  {failed}", flush=True)
    finally:
        server.terminate()
        server.wait()


def warm(base: str, some: list[str]) -> None:
    """Wait for the server, and let each of its processes prepare."""
    until = time.monotonic() + 120
    while True:
        try:
            urlopen(base + some[0]).read()
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    for address in some:
        urlopen(base + address).read()


def wrk(base: str, of: list[str], given: argparse.Namespace) -> list[int]:
    """Requests, median, 95th and 99th percentile and longest time in microseconds, and failures."""
    with tempfile.TemporaryDirectory() as folder:
        listed, script = Path(folder, "addresses.txt"), Path(folder, "draw.lua")
        listed.write_text("\n".join(of))
        script.write_text(SCRIPT % (listed, f"function delay() return {given.pause} end" if given.pause else ""))
        command = ["wrk", "-t", "2", "-c", str(given.connections), "-d", f"{given.seconds}s", "-s", str(script), base]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return [int(number) for number in found.split()[1:]]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that are alive."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if pid in (int(stat.parent.name), int(fields[1])):
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


if __name__ == "__main__":
    main()

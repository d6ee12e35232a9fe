"""Refreshing the list prices."""

from __future__ import annotations

import datetime
import http.server
import importlib.util
import io
import math
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.contrib.prices import Listing, list_prices, refresh_prices
from meshwright.errors import InputError, MeshwrightError
from meshwright.extras import how_to_install

TODAY = datetime.date(2026, 11, 22)
HAS_GPUHUNT = importlib.util.find_spec("gpuhunt") is not None


# Refreshing. `Item` and `Catalog` have the fields of gpuhunt's that are read.


@dataclass
class Item:
    instance_name: str
    gpu_name: str | None
    gpu_memory: float | None
    price: float
    gpu_count: int = 8
    location: str = "us-east-1"
    spot: bool = False


@dataclass
class Catalog:
    items: list[Item]
    version: str = "20261120-7"


@dataclass
class Written:
    """A refreshed file, and what it holds by chip and provider."""

    path: Path
    prices: dict[tuple[str, str], Listing] = field(default_factory=dict)


def written(folder: Path, **catalogs: Catalog) -> Written:
    refreshed = refresh_prices(folder / "cache" / "prices.toml", catalogs=catalogs)
    prices = {(listing.chip, listing.provider): listing for listing in refreshed.listings}
    return Written(path=refreshed.path, prices=prices)


def test_refreshed_prices_replace_the_older_ones_of_the_same_provider(tmp_path):
    items = [Item("gpu_8x_h100_sxm5", "H100", 80.0, 40.0)]
    made = written(tmp_path, lambdalabs=Catalog(items))
    before, after = list_prices("H100"), list_prices("H100", refreshed=made.path)
    assert [listing.provider for listing in before] != [listing.provider for listing in after]
    assert {listing.provider for listing in before} == {listing.provider for listing in after}
    (ours,) = [listing for listing in after if listing.provider == "Lambda"]
    assert (ours.usd_per_device_hour, ours.date) == (5.0, datetime.date(2026, 11, 20))
    assert ours.listed == "gpu_8x_h100_sxm5 in us-east-1, 8 devices, $40 per hour"
    assert ours.source.endswith("/lambdalabs/20261120-7/catalog.zip")
    assert list_prices("B200", refreshed=made.path) == list_prices("B200")


def test_an_older_refresh_does_not_replace_a_newer_price(tmp_path):
    items = [Item("gpu_8x_h100_sxm5", "H100", 80.0, 40.0)]
    made = written(tmp_path, lambdalabs=Catalog(items, "20250101-1"))
    assert list_prices("H100", refreshed=made.path) == list_prices("H100")


@pytest.mark.parametrize(
    ("item", "chip", "price"),
    [
        (Item("p4de.24xlarge", "A100", 80.0, 32.0), "A100-80GB", 4.0),
        (Item("p4d.24xlarge", "A100", 40.0, 16.0), "A100-40GB", 2.0),
        (Item("Standard_ND96isr_H100_v5", "H100", 80.0, 96.0), "H100", 12.0),
        (Item("gpu_1x_h100_pcie", "H100", 80.0, 3.0, 1), "H100-PCIe", 3.0),
        (Item("NVIDIA H100 80GB HBM3", "H100", 80.0, 32.0), "H100", 4.0),
        (Item("Standard_NC24ads_A100_v4", "A100", 80.0, 4.0, 1), None, 0),  # a card, which its name hides
        (Item("p3.16xlarge", "V100", 16.0, 24.0), "V100-16GB", 3.0),
        (Item("any", "H100NVL", 94.0, 4.0, 1), "H100-NVL", 4.0),
        (Item("any", "MI325X", 288.0, 16.0), "MI325X", 2.0),
        (Item("any", "RTXPRO6000", 96.0, 16.0), "RTX-PRO-6000", 2.0),
        (Item("Standard_NV6ads_A10_v5", "A10", 4.0, 1.0, 1), None, 0),  # a sixth of one
        (Item("v5p-8", "v5p-8", 95.0, 16.8, 1), "v5p", 4.2),  # 8 cores, 4 chips
        (Item("v5litepod-8", "v5litepod-8", 128.0, 9.6, 1), "v5e", 1.2),
        (Item("v3-8", "v3-8", 128.0, 8.0, 1), "v3", 1.0),  # a device is a core
        (Item("v2-8", "v2-8", 64.0, 4.5, 1), None, 0),
        (Item("p5.48xlarge", "H100", 80.0, 40.0, spot=True), None, 0),
        (Item("p5.48xlarge", "H100", 80.0, math.nan), None, 0),
        (Item("p5.48xlarge", "H100", 80.0, 0.0), None, 0),
        (Item("m7.large", None, None, 1.0, 0), None, 0),
        (Item("new", "X900", 500.0, 9.0), None, 0),
    ],
)
def test_a_price_counts_if_it_is_certain_which_chip_it_is_for(tmp_path, item, chip, price):
    if chip is None:
        with pytest.raises(MeshwrightError, match="no price that can be used") as refused:
            written(tmp_path, gcp=Catalog([item]))
        assert "gcp: no on-demand price of a known chip" in refused.value.message
        assert not (tmp_path / "cache").exists()
    else:
        ((found, listing),) = written(tmp_path, gcp=Catalog([item])).prices.items()
        assert found == (chip, "Google Cloud")
        assert listing.usd_per_device_hour == pytest.approx(price)


def test_of_a_providers_instances_whole_hosts_count_in_the_cheapest_region(tmp_path):
    items = [
        Item("a2-1g", "B200", 180.0, 4.0, 1),
        Item("a2-8g", "B200", 180.0, 48.0, location="far"),
        Item("a2-8g", "B200", 180.0, 40.0, location="near"),
    ]
    listing = written(tmp_path, gcp=Catalog(items)).prices["B200", "Google Cloud"]
    assert listing.usd_per_device_hour == 5.0
    assert "near" in listing.listed


def test_marketplaces_and_catalogs_without_a_day_are_left_out_by_name(tmp_path):
    b200 = [Item("b200", "B200", 180.0, 40.0)]
    catalogs = {
        "vastai": Catalog(b200),
        "nebius": Catalog(b200, "latest"),
        "oci": Catalog(b200, "20261399-1"),
        "runpod": Catalog([Item("NVIDIA B200", "B200", 180.0, 8.0, location="SE")]),
        "verda": Catalog(b200),
    }
    refreshed = refresh_prices(tmp_path / "prices.toml", catalogs=catalogs)
    assert [listing.provider for listing in refreshed.listings] == ["Verda"]
    assert refreshed.left_out == {
        "aws": "not downloaded",
        "azure": "not downloaded",
        "gcp": "not downloaded",
        "lambdalabs": "not downloaded",
        "vastai": "not a provider with list prices",
        "nebius": "the version 'latest' names no day",
        "oci": "the version '20261399-1' names no day",
        "runpod": "no on-demand price of a known chip",
    }


@given(name=st.text(), place=st.text(), price=st.floats(0.01, 1e4))
def test_whatever_a_catalog_says_the_file_can_be_read(tmp_path_factory, name, place, price):
    path = tmp_path_factory.mktemp("prices") / "prices.toml"
    catalogs = {"gcp": Catalog([Item(name, "B200", 180.0, price, location=place)])}
    (listing,) = refresh_prices(path, catalogs=catalogs).listings
    assert listing.usd_per_device_hour == pytest.approx(price / 8, abs=1e-6)
    assert listing in list_prices("B200", refreshed=path)


HEAD = "[x]\nprovider = 'P'\ndate = 2026-01-01\nsource = 's'\n"


@pytest.mark.parametrize(
    "text",
    [
        "a = [",
        "[x]\nprovider = 'P'\n",
        "x = 1\n",
        HEAD.replace("2026-01-01", "'today'") + "prices = []\n",
        HEAD + "prices = [{ chip = 'H100', usd_per_device_hour = -1.0, listed = '' }]\n",
        HEAD + "prices = [{ chip = 'H1', usd_per_device_hour = 1.0, listed = '' }]\n",
        HEAD + "prices = [{ chip = 'H100', more = 1 }]\n",
        HEAD + "prices = [{ chip = 'H100', usd_per_device_hour = '1', listed = '' }]\n",
    ],
)
def test_a_broken_file_is_refused_and_says_how_to_go_on(tmp_path, text):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"the refreshed prices in .* cannot be read") as refused:
        list_prices("H100", refreshed=path)
    assert "refresh them again, or delete the file" in refused.value.hint


def test_a_refresh_that_fails_leaves_the_file_as_it_is(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text("# mine\n")
    with pytest.raises(MeshwrightError, match="no price that can be used"):
        refresh_prices(path, catalogs={})
    assert path.read_text() == "# mine\n"
    (tmp_path / "file").write_text("")
    good = {"gcp": Catalog([Item("b200", "B200", 180.0, 40.0)])}
    with pytest.raises(MeshwrightError, match="the prices cannot be written to"):
        refresh_prices(tmp_path / "file" / "prices.toml", catalogs=good)


@pytest.mark.skipif(HAS_GPUHUNT, reason="gpuhunt is installed")
def test_without_gpuhunt_a_refresh_says_how_to_install_it(tmp_path):
    with pytest.raises(InputError, match="gpuhunt, which is not installed") as refused:
        refresh_prices(tmp_path / "prices.toml")
    assert refused.value.hint == how_to_install("prices")


# With gpuhunt itself, which downloads from a server here.

COLUMNS = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags,"
    "cpu_arch,provider_data\n"
)
ROWS = """\
gpu_8x_h100_sxm5,us-south-1,40.0,208,1800.0,8,H100,80.0,False,22000.0,nvidia,,x86,{}
gpu_8x_h100_sxm5,us-south-1,20.0,208,1800.0,8,H100,80.0,True,22000.0,nvidia,,x86,{}
"""
# In a process of its own: gpuhunt leaves answers open, which are errors in this one.
REFRESH = """
import sys
from pathlib import Path
from meshwright.errors import MeshwrightError
from meshwright.contrib.prices import Listing, list_prices, refresh_prices
try:
    made = refresh_prices(Path(sys.argv[1]))
except MeshwrightError as failed:
    sys.exit(str(failed))
for each in made.listings:
    print(each.chip, each.provider, each.usd_per_device_hour, each.date)
print(set(made.left_out.values()))
"""


def refreshed_by_gpuhunt(folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPUHUNT_CATALOG_URL": address, "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", REFRESH, str(folder / "prices.toml")]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


class Published(http.server.BaseHTTPRequestHandler):
    """Serves one provider's catalog as dstack's bucket does, and nothing else."""

    def do_GET(self):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("lambdalabs.csv", COLUMNS + ROWS)
        known = {
            "/lambdalabs/version": b"20261120-7\n",
            "/lambdalabs/20261120-7/catalog.zip": packed.getvalue(),
        }
        self.send_response(200 if self.path in known else 404)
        self.end_headers()
        self.wfile.write(known.get(self.path, b""))

    def log_message(self, format, *args):
        pass


@pytest.fixture
def address() -> Iterator[str]:
    """Where gpuhunt finds its catalogs."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Published)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(not HAS_GPUHUNT, reason="needs the extra `prices`")
def test_gpuhunt_downloads_what_is_refreshed(tmp_path, address):
    done = refreshed_by_gpuhunt(tmp_path, address)
    assert done.stdout == "H100 Lambda 5.0 2026-11-20\n{'not downloaded'}\n", done.stderr
    assert done.stderr == ""


@pytest.mark.skipif(not HAS_GPUHUNT, reason="needs the extra `prices`")
def test_without_a_connection_the_refresh_says_so(tmp_path):
    done = refreshed_by_gpuhunt(tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("gpuhunt could not download its catalogs: ")
    assert "Connection refused" in done.stderr
    assert "Traceback" not in done.stderr

"""Following files: how they are replaced in real life, and broken versions."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from extproc.envoyconf import ConfigError
from extproc.fleet.config import RouterConfig
from extproc.fleet.watch import Watcher


def bootstrap(*ports: int, pool: str = "chat") -> str:
    endpoints = ", ".join(
        f"{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}}}"
        for port in ports
    )
    return (
        f"static_resources: {{clusters: [{{name: {pool}, metadata: {{filter_metadata: {{extproc: {{}}}}}},"
        f" load_assignment: {{endpoints: [{{lb_endpoints: [{endpoints}]}}]}}}}]}}\n"
    )


def ports(config: RouterConfig) -> list[int]:
    return [endpoint.port for pool in config.pools.values() for endpoint in pool.endpoints]


class Follower:
    """A running watcher; `next` is the next thing it told."""

    def __init__(self, path: Path):
        self.told: asyncio.Queue[RouterConfig | ConfigError] = asyncio.Queue()
        self.watcher = Watcher(
            path, self.told.put_nowait, self.told.put_nowait, interval_s=0.01, settle_s=0.01
        )
        self.first = self.watcher.start()

    async def next(self) -> RouterConfig | ConfigError:
        return await asyncio.wait_for(self.told.get(), 30)


@contextlib.asynccontextmanager
async def follow(path: Path):
    follower = Follower(path)
    task = asyncio.create_task(follower.watcher.run())
    try:
        yield follower
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_write_in_place(tmp_path):
    file = tmp_path / "envoy.yaml"
    file.write_text(bootstrap(1, 2))
    async with follow(file) as follower:
        assert ports(follower.first) == [1, 2]
        file.write_text(bootstrap(1, 2, 3))
        assert ports(await follower.next()) == [1, 2, 3]


async def test_same_size_and_time_stamp(tmp_path):
    file = tmp_path / "envoy.yaml"
    file.write_text(bootstrap(1))
    stat = file.stat()
    async with follow(file) as follower:
        file.write_text(bootstrap(2))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert ports(await follower.next()) == [2]


async def test_rename_over_the_file(tmp_path):
    file = tmp_path / "envoy.yaml"
    file.write_text(bootstrap(1))
    async with follow(file) as follower:
        (tmp_path / "new").write_text(bootstrap(2))
        (tmp_path / "new").rename(file)
        assert ports(await follower.next()) == [2]


async def test_swap_of_a_config_map(tmp_path):
    """Kubernetes: FILE -> ..data/FILE, ..data -> ..VERSION; an update renames a new link over ..data."""
    for version, port in (("..1", 1), ("..2", 2)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "envoy.yaml").write_text(bootstrap(port))
    (tmp_path / "..data").symlink_to("..1")
    file = tmp_path / "envoy.yaml"
    file.symlink_to("..data/envoy.yaml")
    async with follow(file) as follower:
        assert ports(follower.first) == [1]
        (tmp_path / "..tmp").symlink_to("..2")
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        assert ports(await follower.next()) == [2]


async def test_a_broken_version_is_told_once_and_the_way_back_is_followed(tmp_path):
    file = tmp_path / "envoy.yaml"
    file.write_text(bootstrap(1))
    async with follow(file) as follower:
        file.write_text("static_resources: {clusters: [")
        error = await follower.next()
        assert isinstance(error, ConfigError)
        assert error.problems[0].file == str(file)
        file.write_text(bootstrap(1) + "# as before")
        file.write_text(bootstrap(4))
        assert ports(await follower.next()) == [4]
        assert follower.told.empty()


async def test_a_file_that_is_gone_is_an_error_until_it_is_back(tmp_path):
    file = tmp_path / "envoy.yaml"
    file.write_text(bootstrap(1))
    async with follow(file) as follower:
        file.unlink()
        assert "can't be read: No such file" in str(await follower.next())
        file.write_text(bootstrap(5))
        assert ports(await follower.next()) == [5]


async def test_files_that_it_points_to_are_followed_also_new_ones(tmp_path):
    main, first, second = tmp_path / "envoy.yaml", tmp_path / "cds.yaml", tmp_path / "other.yaml"

    def write(cds: Path, port: int) -> None:
        cluster = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
        text = bootstrap(port).replace(
            "static_resources: {clusters: [{", f'resources: [{{"@type": {cluster}, '
        )
        cds.write_text(text.replace("]}]}}]}", "]}]}}]"))

    def point(cds: Path) -> None:
        main.write_text(f"dynamic_resources: {{cds_config: {{path_config_source: {{path: {cds}}}}}}}")

    write(first, 1)
    write(second, 2)
    point(first)
    async with follow(main) as follower:
        assert ports(follower.first) == [1]
        write(first, 11)
        assert ports(await follower.next()) == [11]
        point(second)
        assert ports(await follower.next()) == [2]
        write(second, 22)
        assert ports(await follower.next()) == [22]
        second.unlink()
        assert "doesn't exist" in str(await follower.next())
        write(second, 23)
        assert ports(await follower.next()) == [23]


async def test_a_change_without_a_difference_is_not_told(tmp_path):
    file = tmp_path / "envoy.yaml"
    file.write_text(bootstrap(1))
    async with follow(file) as follower:
        file.write_text("# a comment\n" + bootstrap(1))
        await asyncio.sleep(0.2)
        file.write_text(bootstrap(2))
        assert ports(await follower.next()) == [2]


def test_the_first_load_raises(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        Follower(tmp_path / "none.yaml")

"""What a server asks before it starts: its address, which nobody else gets and Serve's proxy does; its model; a living Ray."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from ray.serve._private.http_util import set_socket_reuse_port

from scheduler.errors import SettingsError
from services.address import check_address, hold_address
from services.cluster import RayDied, check_alive
from services.launch import check_files
from services.settings import Settings

HOST = "127.0.0.1"


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        number = probe.getsockname()[1]
    yield number


def test_of_two_servers_begun_at_once_the_second_is_told_that_the_port_is_in_use(port):
    check_address(HOST, port)
    with hold_address(HOST, port):
        for host in (HOST, "0.0.0.0"):
            with pytest.raises(SettingsError, match=rf"gateway.port: {port} on {host} is in use"):
                check_address(host, port)
    check_address(HOST, port)


def test_serves_proxy_listens_where_the_address_is_held_and_gets_every_connection(port):
    with hold_address(HOST, port), socket.socket() as proxy:
        set_socket_reuse_port(proxy)
        proxy.bind((HOST, port))
        proxy.listen()
        for _ in range(20):
            with socket.create_connection((HOST, port), timeout=60):
                proxy.accept()[0].close()


def test_a_port_that_cannot_be_held_is_not_held(port):
    with socket.socket() as other:
        other.bind((HOST, port))
        other.listen()
        assert hold_address(HOST, port) is None


def test_a_daemon_that_nobody_listens_for_any_more_has_died(port):
    with socket.socket() as daemon:
        daemon.bind((HOST, port))
        daemon.listen()
        check_alive({"raylet": (HOST, port)})
    with pytest.raises(RayDied, match="raylet"):
        check_alive({"raylet": (HOST, port)})


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere.gguf"])
def test_a_model_that_is_not_there_is_refused_before_anything_starts(path):
    with pytest.raises(SettingsError, match=r"model\.path: .*nowhere.* does not exist"):
        check_files(Settings.model_validate({"model": {"path": path}}))

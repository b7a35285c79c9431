"""A short probe of the real machine: every rate is there, positive and possible."""

import importlib.util
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimizer.base.errors import InvalidInput
from optimizer.base.units import MIB
from optimizer.estimate.categories.network import Network
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import LOOPBACK
from optimizer.hardware.probe import steps
from optimizer.hardware.probe.clock import as_curve, better_of, random_tensor
from optimizer.hardware.probe.probe import probe_machine
from optimizer.hardware.probe.rates import decoding, stores
from optimizer.hardware.probe.rates.peer_exchange import SIZES
from optimizer.hardware.probe.rates.peers import measured_link, probe_peers
from optimizer.hardware.probe.rates.stores import faults_of, probe_disk, probe_remote
from optimizer.hardware.probe.thread_wakeup import alone, probe_wake_s
from optimizer.runtime.layers.matmul_dispatch import has_quicker_library
from tests.valkey import Valkey


@pytest.fixture(scope="module")
def machine() -> Machine:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    measured = probe_machine(name="here", device="cpu", max_s=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(threads)
    return measured


def test_every_rate_is_measured_and_possible(machine: Machine) -> None:
    rates = machine.rates
    assert rates.source == "measured"
    assert set(rates.matmul_flops_per_s) == set(rates.attention_flops_per_s) == {"fp32", "bf16"}
    for rate in (*rates.matmul_flops_per_s.values(), *rates.attention_flops_per_s.values()):
        assert 1e7 < rate < 1e15
    for rate in (rates.memory_bytes_per_s, rates.device_to_host_bytes_per_s, rates.host_to_device_bytes_per_s):
        assert 1e7 < rate < 1e13
    assert 1e-8 < rates.op_overhead_s < 0.1


def test_curves_dispatch_and_fresh_memory_are_measured_and_possible(machine: Machine) -> None:
    rates = machine.rates
    assert {"mm fp32", "mm nt fp32", "bmm tn fp32", "mm bf16", "mm nn fp16"} <= set(rates.matmul_curves)
    assert {"rows nt fp32", "rows nt fp32 cold", "rows nt bf16"} <= set(rates.matmul_curves)
    causal = {"forward fp32", "backward bf16", "forward fp16", "token fp32"}
    assert causal | {"backward whole bf16", "forward whole fp16"} <= set(rates.attention_curves)
    assert "draw" in rates.op_curves
    assert {"tanh", "_softmax", "embedding_dense_backward", "_to_copy int8", "elementwise", "reduction", "gather"} <= set(
        rates.op_curves
    )
    tables = (rates.matmul_curves, rates.attention_curves, rates.host_attention_curves)
    curves = (*tables, rates.op_curves, rates.packing_curves)
    for curve in (curve for table in curves for curve in table.values()):
        sizes = [size for size, _ in curve]
        assert sizes == sorted(sizes)
        assert all(1e5 < rate < 1e15 for _, rate in curve)
    assert 1e-7 < rates.backward_dispatch_s < 1e-2
    assert 1e-7 < rates.forward_dispatch_s < 1e-2
    each = {"update many", "update one", "gradients", "state", "state at home", "update 8-bit", "weights"}
    of_passes = {"token", "weights of a pass", "keys and values", "stored weights", "stored keys and values"}
    assert set(rates.python_s) == {"recompute op", "selective op", "offload", "micro-batch", "step", *each, *of_passes}
    assert 1e-7 < rates.pass_dispatch_s < 1e-2
    assert set(rates.packing_curves) == {f"{way} {form}" for way in ("pack", "unpack") for form in ("bf16", "int8")}
    assert 1e7 < rates.fresh_bytes_per_s < 1e13
    assert set(rates.link_bytes_per_s) == {"device_to_host alone", "host_to_device alone"}


def test_attention_on_the_host_is_measured_by_how_many_queries_share_a_key(machine: Machine) -> None:
    """FLOPs for each byte of keys and values: half of the queries that share a key in fp32, as many in 16 bits."""
    found = {name: tuple(intensity for intensity, _ in curve) for name, curve in machine.rates.host_attention_curves.items()}
    assert found == {"fp32": (0.5, 2.0, 4.0), "bf16": (1.0, 4.0, 8.0), "fp16": (1.0, 4.0, 8.0)}


def test_where_a_library_makes_large_products_small_ones_have_curves_of_their_own(machine: Machine) -> None:
    curves, is_librarys = machine.rates.matmul_curves, has_quicker_library()
    assert machine.packs_fp32 == is_librarys
    assert (machine.rates.library_call_s > 0) == is_librarys
    own = {"small fp32", "small nt fp32", "small rows nt fp32", "small rows nt fp32 cold"}
    assert (own <= set(curves)) == is_librarys
    assert not any("small" in name and "fp32" not in name for name in curves)


def test_points_near_each_other_become_one_of_their_mean_time_and_sizes_rise() -> None:
    assert as_curve([(100.0, 8.0), (10.0, 2.0), (10.5, 6.0)]) == ((10.25, 3.0), (100.0, 8.0))


def test_the_better_rate_of_two_visits_counts_for_each_point() -> None:
    first = {"mm": ((1.0, 5.0), (2.0, 9.0)), "bmm": ((1.0, 3.0),)}
    second = {"mm": ((1.0, 7.0), (2.0, 2.0), (4.0, 8.0))}
    assert better_of([first, second]) == {"mm": ((1.0, 7.0), (2.0, 9.0), (4.0, 8.0)), "bmm": ((1.0, 3.0),)}


def test_large_tensors_repeat_what_was_drawn() -> None:
    drawn = random_tensor((3, 1 << 17), torch.device("cpu"), torch.float32)
    assert torch.equal(drawn[0], drawn[2])
    assert drawn.std() == pytest.approx(1, rel=0.02)


def test_8_bit_state_is_measured_where_bitsandbytes_is(machine: Machine) -> None:
    has_it = importlib.util.find_spec("bitsandbytes") is not None
    assert set(machine.rates.optimizer_elements_per_s) == ({"adamw_32", "adamw_8"} if has_it else {"adamw_32"})


def test_the_cpu_device_takes_half_of_the_memory_and_leaves_half_to_the_host(machine: Machine) -> None:
    assert abs(machine.device.memory_bytes - machine.host_memory_bytes) <= 1


def test_threads_are_those_of_the_process_and_facts_name_the_software(machine: Machine) -> None:
    assert machine.name == "here"
    assert machine.num_threads == 1
    assert machine.facts["torch"] == torch.__version__
    assert machine.facts["processor"]
    assert machine.facts["instructions"]


def test_the_hosts_optimizer_is_the_cpu_devices_own(machine: Machine) -> None:
    assert machine.rates.host_optimizer_elements_per_s == machine.rates.optimizer_elements_per_s["adamw_32"]


def test_the_disk_of_the_scratch_folder_is_measured_and_left_as_it_was(machine: Machine, tmp_path: Path) -> None:
    assert 1e6 < machine.rates.disk_write_bytes_per_s < 1e12
    assert 1e6 < machine.rates.disk_read_bytes_per_s < 1e12
    assert 1e6 < machine.rates.disk_cached_read_bytes_per_s < 1e12
    assert machine.disk_free_bytes > 0
    probe_disk(tmp_path, max_s=0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_means_no_disk_tier_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = probe_disk(tmp_path / "file", max_s=0.01)
    assert (found.free_bytes, found.write_bytes_per_s) == (0, None)
    assert "file" in faults_of(disk=found)["disk"]


def test_a_disk_with_little_room_is_a_tier_still(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The disk has less room than it takes to measure the page cache."""
    monkeypatch.setattr(stores, "_CACHED_BYTES", 2**62)
    found = probe_disk(tmp_path, max_s=0.01)
    assert found.cached_read_bytes_per_s is None
    assert found.read_bytes_per_s
    assert found.free_bytes > 0
    assert not found.fault


def test_a_remote_store_is_measured_where_one_is_configured(remote: Valkey) -> None:
    found = probe_remote(max_s=0.01)
    assert 1e6 < found.write_bytes_per_s < 1e12
    assert 1e6 < found.read_bytes_per_s < 1e12
    assert 0 < found.round_trip_s < 1
    assert found.free_bytes > 0
    assert remote.list_keys() == []


def test_no_remote_tier_without_a_store_and_one_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, tmp_path: Path
) -> None:
    assert (machine.remote_free_bytes, machine.rates.remote_read_bytes_per_s) == (0, None)
    assert "remote" not in machine.facts
    monkeypatch.setenv("HEADROOM_REMOTE_URL", f"unix://{tmp_path}/none.sock")
    found = probe_remote(max_s=0.01)
    assert (found.free_bytes, found.read_bytes_per_s) == (0, None)
    assert "does not answer" in faults_of(remote=found)["remote"]


def test_a_probed_machine_crosses_json(machine: Machine) -> None:
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("device", ["cuda:77", "warp drive", "meta"])
def test_a_device_that_is_not_there_is_refused_by_name(device: str) -> None:
    with pytest.raises(InvalidInput, match=rf"device '{device}' is not on this machine; present: cpu"):
        probe_machine(device=device)


def test_the_largest_cache_is_that_of_one_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, size in enumerate(("32K", "512K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(decoding, "_CACHES", tmp_path)
    assert decoding.find_cache_bytes() == 32 * MIB
    monkeypatch.setattr(decoding, "_CACHES", tmp_path / "nowhere")
    assert decoding.find_cache_bytes() is None


def test_every_copy_of_an_offloading_step_is_counted() -> None:
    """The hooks' cost is divided by the copies: an op that copies under another name would make each cost as much as all."""
    device, plans = torch.device("cpu"), steps._list_plans()
    counted, copied = {}, {}
    for name in ("keep", "offload"):
        run = steps._Run(plans[name], steps._PhaseMeter(device))
        counted[name] = run.count_step().copies.total()
        copied[name] = sum(run.trainer.tiers.copied_bytes.values())
        run.trainer.close()
    assert copied["keep"] == 0 < copied["offload"]
    # Out and in: of each of the two blocks the input and what its products and its activation save.
    assert counted["offload"] - counted["keep"] >= 2 * 2 * 10


def test_waking_is_measured_where_there_is_somebody_to_wake() -> None:
    device, num_threads = torch.device("cpu"), torch.get_num_threads()
    with alone(device):
        assert torch.get_num_threads() == 1
        assert probe_wake_s(device, max_s=0.01) == 0.0
    assert torch.get_num_threads() == num_threads
    torch.set_num_threads(2)
    try:
        assert 0.0 <= probe_wake_s(device, max_s=0.01) < 0.1
    finally:
        torch.set_num_threads(num_threads)


def test_the_link_between_played_devices_is_measured_by_processes_that_exchange(machine: Machine) -> None:
    assert (machine.num_devices, machine.peers) == (1, None)
    link = probe_peers(replace(machine, num_devices=2), max_s=0.1)
    assert link is not None
    assert (link.kind, link.source) == ("loopback", "measured")
    assert 1e6 < link.bytes_per_s < 1e12
    assert 1e-7 < link.latency_s < 1
    assert [size for size, _ in link.bytes_per_s_by_size] == [2**16, 2**20, 2**22, 2**24]
    assert link.bytes_per_s_by_size[-1][1] == link.bytes_per_s
    assert Machine.from_json(replace(machine, num_devices=2, peers=link).to_json()).peers == link


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_link_that_is_measured_is_the_one_that_the_exchanges_took_place_on(num_ranks: int) -> None:
    real = PeerLink(kind="loopback", bytes_per_s=5e7, latency_s=1e-3, source="table")
    gloo = Network(num_ranks=num_ranks, backend="gloo", link=real)
    seconds = {size: gloo.seconds("all_reduce", size) for size in SIZES}
    found = measured_link(seconds, LOOPBACK, num_ranks=num_ranks, is_gloo=True)
    assert found.latency_s == pytest.approx(real.latency_s, rel=0.05)
    assert found.bytes_per_s == pytest.approx(real.bytes_per_s, rel=0.15)
    nccl = replace(gloo, backend="nccl")
    on_cards = {size: nccl.seconds("all_reduce", size) for size in SIZES}
    found = measured_link(on_cards, LOOPBACK, num_ranks=num_ranks, is_gloo=False)
    assert found.latency_s == pytest.approx(1e-3, rel=0.05)
    assert found.bytes_per_s == pytest.approx(5e7, rel=0.01)


def test_where_no_process_can_start_the_link_is_assumed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert probe_peers(replace(machine, num_devices=2), max_s=0.1) == LOOPBACK


def test_where_processes_end_without_an_answer_the_link_is_assumed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADROOM_RANK_INTERFACE", "nowhere")
    assert probe_peers(replace(machine, num_devices=2), max_s=0.1) == LOOPBACK


def test_a_link_stored_before_rates_by_size_were_measured_is_still_read(machine: Machine) -> None:
    document = replace(machine, num_devices=2, peers=LOOPBACK).to_json()
    del document["peers"]["bytes_per_s_by_size"]
    assert Machine.from_json(document).peers == LOOPBACK


@pytest.mark.parametrize("num_devices", [0, 65])
def test_a_machine_has_at_least_one_device_and_at_most_64(machine: Machine, num_devices: int) -> None:
    with pytest.raises(InvalidInput, match=f"machine.num_devices is {num_devices}; allowed: 1 to 64"):
        Machine.from_json({**machine.to_json(), "num_devices": num_devices})


def test_a_document_written_before_devices_were_counted_is_of_one(machine: Machine) -> None:
    document = {name: value for name, value in machine.to_json().items() if name not in ("num_devices", "peers")}
    read = Machine.from_json(document)
    assert (read.num_devices, read.peers) == (1, None)

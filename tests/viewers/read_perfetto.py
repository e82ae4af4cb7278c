#!/usr/bin/env python3
"""Reads the Perfetto traces of a synthetic profile with Perfetto's own message definitions.

usage: read_perfetto.py DIRECTORY

With trace_processor_shell on PATH, the traces are also loaded as ui.perfetto.dev does it.
"""

import collections
import pathlib
import shutil
import sys
import zlib

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto


def check(condition, text):
    if not condition:
        sys.exit(f"read_perfetto.py: {text}")


def has_unknown_fields(message):
    """True if bytes of the message belong to no field of its definition."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return known.SerializeToString() != message.SerializeToString()


def packets_of(path):
    trace = proto.Trace()
    trace.ParseFromString(path.read_bytes())
    for packet in trace.packet:
        if not packet.HasField("compressed_packets"):
            yield packet
            continue
        block = proto.Trace()
        block.ParseFromString(zlib.decompress(packet.compressed_packets))
        check(not has_unknown_fields(block), f"{path.name}: unknown fields")
        yield from block.packet


def read(path):
    """Returns the numbers of slices, of tracks by name, and the identifiers of flows."""
    event_type = proto.TrackEvent.Type
    names, notes = collections.defaultdict(dict), collections.defaultdict(dict)
    tracks, depth, last = {}, collections.Counter(), collections.defaultdict(int)
    counters, units = collections.Counter(), {}
    slices, starting, ending = 0, [], []
    for packet in packets_of(path):
        sequence = packet.trusted_packet_sequence_id
        check(sequence, f"{path.name}: a packet without a sequence")
        if packet.sequence_flags & 1:
            names[sequence].clear()
        for entry in packet.interned_data.event_names:
            names[sequence][entry.iid] = entry.name
        for entry in packet.interned_data.debug_annotation_names:
            notes[sequence][entry.iid] = entry.name
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            check(descriptor.uuid not in tracks, f"{path.name}: two tracks have the number {descriptor.uuid}")
            check(not descriptor.parent_uuid or descriptor.parent_uuid in tracks, "a track comes before its parent")
            tracks[descriptor.uuid] = (
                descriptor.name or descriptor.process.process_name or descriptor.thread.thread_name
            )
            if descriptor.HasField("counter"):
                units[descriptor.uuid] = descriptor.counter.unit
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        check(packet.sequence_flags & 2, "an event without the flag that it needs names")
        check(event.track_uuid in tracks, f"{path.name}: an event before its track")
        check(packet.timestamp >= last[sequence], f"{path.name}: times do not ascend")
        last[sequence] = packet.timestamp
        if event.type == event_type.TYPE_COUNTER:
            counters[tracks[event.track_uuid]] += 1
            check(event.counter_value >= 0, "a negative counter")
            check(units[event.track_uuid] == proto.CounterDescriptor.UNIT_SIZE_BYTES, "a counter without its unit")
        elif event.type == event_type.TYPE_SLICE_BEGIN:
            check(names[sequence].get(event.name_iid), "a slice without a name")
            check(all(notes[sequence].get(note.name_iid) for note in event.debug_annotations), "a note without a name")
            depth[event.track_uuid] += 1
            slices += 1
        else:
            check(event.type == event_type.TYPE_SLICE_END, f"an event of type {event.type}")
            depth[event.track_uuid] -= 1
            check(depth[event.track_uuid] >= 0, f"{path.name}: an end without a begin")
        starting += event.flow_ids
        ending += event.terminating_flow_ids
    check(not any(depth.values()), f"{path.name}: begins without an end")
    return slices, collections.Counter(tracks.values()), starting, ending, counters


def load(path, slices, flows):
    """Loads the trace as the viewer does."""
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    config = TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    with TraceProcessor(trace=str(path), config=config) as processor:
        count = lambda query: next(iter(processor.query(query))).n
        check(count("select count(*) as n from slice") == slices, "slices were lost")
        check(count("select count(*) as n from flow") == flows, "flows were lost")
        check(count("select count(*) as n from stats where severity = 'error' and value > 0") == 0, "errors")


def main():
    directory = pathlib.Path(sys.argv[1])
    all_slices, all_tracks, starting, ending, counters = read(directory / "all.pftrace")
    each = [read(directory / f"rank-{rank}.pftrace") for rank in (0, 1)]
    check(all_slices == sum(one[0] for one in each), "slices of the ranks do not add up")
    check(len(starting) == len(set(starting)) > 0, "flows have one number")
    check(sorted(starting) == sorted(ending), "flows do not pair")
    for name in ("rank 0 node0 H100", "rank 1 node0 H100"):
        check(all_tracks[name] == 1, f"no process {name}")
    for name in ("main", "device stream 1", "pp[0,1]"):
        check(all_tracks[name] == 2, f"{all_tracks[name]} tracks {name}")
    check(all_tracks["dp[0,1]"] == 4, "two lanes per rank for dp")
    for name in ("weights", "activations", "workspace"):
        check(counters[f"memory: {name}"] > 0, f"no memory of {name}")
    if shutil.which("trace_processor_shell"):
        load(directory / "all.pftrace", all_slices, len(starting))
        print("trace_processor_shell: loaded")
    else:
        print("trace_processor_shell: not on PATH, not run")
    print(f"{all_slices} slices, {len(starting)} flows, {sum(all_tracks.values())} tracks, {sum(counters.values())} counts")


main()

"""Write traces in the format of torch.profiler, a few events each: microseconds, one thread for the host."""

import gzip
import json

HOST, BACKWARD = 10, 11


class Kineto:
    """The events of one rank."""

    def __init__(self, rank=None, world=1, **about):
        self.events, self.number = [], 0
        self.about = {"schemaVersion": 1, **about}
        if rank is not None:
            self.about["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}

    def put(self, cat, name, ts, dur, tid=HOST, **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )
        return self

    def step(self, number, ts, dur):
        return self.put("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def op(self, name, ts, dur, tid=HOST, sequence=None, forward=0, dims=None, types=("float",)):
        self.number += 1
        args = {"External id": self.number, "Input Dims": dims or [[2]], "Input type": list(types)}
        if sequence is not None:
            args |= {"Sequence number": sequence, "Fwd thread id": forward}
        return self.put("cpu_op", name, ts, dur, tid, **args)

    def python(self, name, ts, dur, tid=HOST):
        return self.put("python_function", name, ts, dur, tid)

    def launch(self, kernel, at, begin, dur, tid=HOST, stream=7, device=0, cat="kernel", **args):
        """Launch a kernel at one time, which runs at another."""
        self.number += 1
        call = "cudaLaunchKernel" if cat == "kernel" else "cudaMemcpyAsync"
        self.put("cuda_runtime", call, at, 2, tid, correlation=self.number)
        facts = {"device": device, "stream": stream, "correlation": self.number, **args}
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": kernel,
                "pid": device,
                "tid": stream,
                "ts": begin,
                "dur": dur,
                "args": facts,
            }
        )
        return self

    def write(self, path):
        text = json.dumps({**self.about, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
        return path

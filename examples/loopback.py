"""The federation's protocol over TCP on this machine, two sites: data and memory stay there, the bits are equal."""

import os
from multiprocessing.connection import Client, Connection, Listener, wait
from threading import Thread

import torch

import hansa
from hansa.federation import Federation, Site

rounds, places = int(os.environ.get("ROUNDS", "10")), {"north": range(6), "south": range(6, 10)}
clients = hansa.data.federate("fashion-mini", clients=10)
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, clients)
method = hansa.presets.fedcams(local_lr=0.05, steps=5, batch_size=20, participation=0.5, two_way=True)


def site(name: str, line: Connection) -> None:  # in practice `hansa join`: a program at the site, over TLS
    line.send_bytes(name.encode())
    here = Site(hansa.Run(method, task).algorithm, task, places[name])
    while True:
        line.send_bytes(here.handle(line.recv_bytes()) or b"")


class Lines(dict[str, Connection]):  # in earnest `hansa serve`; by the sites' names
    def send(self, name: str, frame: bytes) -> None:
        self[name].send_bytes(frame)

    def receive(self) -> list[tuple[str, bytes]]:
        there = wait(self.values(), timeout=60)
        return [(name, line.recv_bytes()) for name, line in self.items() if line in there]


with Listener(("127.0.0.1", 0)) as door:
    for name in places:
        Thread(target=site, args=(name, Client(door.address)), daemon=True).start()
    wire = Lines((line.recv_bytes().decode(), line) for line in [door.accept() for _ in places])
    run = hansa.Run(method, task, engine=lambda *parts: Federation(*parts, transport=wire, sites=places))
    print(run.advance(rounds).table("round", "test_accuracy", "up_bytes"))
print("equal to the simulation:", torch.equal(run.params, hansa.run(method, task, rounds=rounds).params))

"""The federation's protocol over TCP on this machine, two sites: data and memory stay there, the bits are equal."""

import os
from multiprocessing.connection import Client, Listener, wait
from threading import Thread

import torch

import hansa
from hansa.federation import Federation, Site

rounds, places = int(os.environ.get("ROUNDS", "10")), {"north": range(6), "south": range(6, 10)}
clients = hansa.data.federate("fashion-mini", clients=10)
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, clients)
method = hansa.presets.fedcams(local_lr=0.05, steps=5, batch_size=20, participation=0.5, two_way=True)


def site(name, line):  # in earnest `hansa join`: a program beside its own clients' data, over TLS
    line.send_bytes(name.encode())
    here = Site(hansa.Run(method, task).algorithm, task, places[name])
    while True:
        line.send_bytes(here.handle(line.recv_bytes()) or b"")


class Lines(dict):  # in earnest `hansa serve`; by the sites' names
    def send(self, name, frame):
        self[name].send_bytes(frame)

    def receive(self):
        there = wait(self.values(), timeout=60)
        return [(name, line.recv_bytes()) for name, line in self.items() if line in there]


with Listener(("127.0.0.1", 0)) as door:
    [Thread(target=site, args=(name, Client(door.address)), daemon=True).start() for name in places]
    wire = Lines((line.recv_bytes().decode(), line) for line in [door.accept() for _ in places])
    run = hansa.Run(method, task, engine=lambda *parts: Federation(*parts, transport=wire, sites=places))
    print(run.advance(rounds).table("round", "test_accuracy", "up_bytes"))
print("equal to the simulation:", torch.equal(run.params, hansa.run(method, task, rounds=rounds).params))

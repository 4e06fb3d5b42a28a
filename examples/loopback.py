"""The federation protocol over TCP with two local sites: data and client memory stay there; the result is the same."""

import os
from multiprocessing.connection import Client, Connection, Listener, wait
from threading import Thread

import torch

import hansa
from hansa.federation.server import Federation
from hansa.federation.site import Site

rounds, sites = int(os.environ.get("ROUNDS", "10")), {"north": range(6), "south": range(6, 10)}
clients = hansa.data.federate("fashion-mini", clients=10)
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, clients)
method = hansa.presets.fedcams(local_lr=0.05, steps=5, batch_size=20, participation=0.5, two_way=True)


def site(name: str, connection: Connection) -> None:  # in practice `hansa join`, over TLS
    connection.send_bytes(name.encode())
    local_site = Site(hansa.Run(method, task).algorithm, task, sites[name])
    while True:
        connection.send_bytes(local_site.handle(connection.recv_bytes()) or b"")


class Connections(dict[str, Connection]):  # connections by site; in practice `hansa serve`
    def send(self, name: str, frame: bytes) -> None:
        self[name].send_bytes(frame)

    def receive(self) -> list[tuple[str, bytes]]:
        ready = wait(self.values(), timeout=60)
        return [(name, connection.recv_bytes()) for name, connection in self.items() if connection in ready]


with Listener(("127.0.0.1", 0)) as listener:
    for name in sites:
        Thread(target=site, args=(name, Client(listener.address)), daemon=True).start()
    wire = Connections((peer.recv_bytes().decode(), peer) for peer in [listener.accept() for _ in sites])
    run = hansa.Run(method, task, engine=lambda *parts: Federation(*parts, transport=wire, sites=sites))
    print(run.advance(rounds).table("round", "test_accuracy", "up_bytes"))
print("equal to the simulation:", torch.equal(run.params, hansa.run(method, task, rounds=rounds).params))

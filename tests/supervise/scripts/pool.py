"""A Pool of the start method given, with classes of __main__ on both sides and an exception from afar."""

import multiprocessing
import pickle
import sys
from dataclasses import dataclass


@dataclass
class Ship:
    name: str
    tons: int


class Aground(Exception):
    pass


def refit(ship: Ship) -> Ship:
    if ship.tons > 300:
        raise Aground(ship.name)
    return Ship(ship.name.upper(), ship.tons + 1)


if __name__ == "__main__":
    fleet = [Ship("wren", 40), Ship("tern", 60), Ship("juno", 90)]
    print(pickle.dumps(fleet), pickle.loads(pickle.dumps(fleet)) == fleet)
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(refit, fleet))
        try:
            pool.map(refit, [Ship("orlop", 500)])
        except Aground as error:
            print("aground:", error, type(error).__module__)
    queue = multiprocessing.get_context(sys.argv[1]).SimpleQueue()
    child = multiprocessing.get_context(sys.argv[1]).Process(target=queue.put, args=(fleet[0],))
    child.start()
    print(queue.get(), child.join(), child.exitcode)

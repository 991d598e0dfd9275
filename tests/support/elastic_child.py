"""Processes of an elastic job that speak the launcher's protocol and compute nothing; see
`job_child`.

A worker reports an iteration once it is connected, and again when it goes on; the memory snapshot
of the start that it continues from is one iteration later each time. With `--balance=auto` client c
takes c + 1 seconds for each virtual worker. All workers of a job have the
same folder, `output` of their document, through which one that regroups tells the others. With a
file `apart` in that folder a fourth worker cannot connect.
"""

from __future__ import annotations

ELASTIC_SHARD = """
beat()
def listen():
    say("listening", address=f"tcp://127.0.0.1:{40000 + os.getpid() % 1000}", round=0)
listen()
for command in commands():
    if command["do"] == "pause":
        say("paused", snapshot=None)
    if command["do"] == "go_on":
        listen()
    if command["do"] == "stop":
        break
else:
    sys.exit(1)
"""

ELASTIC_WORKER = """
beat()
lock, running, snapshot = threading.Lock(), False, None
def pause(**fields):
    global running
    with lock:
        if running or not fields.get("regrouped"):
            say("paused", snapshot=snapshot, **fields)
        running = False
def sign():
    return os.path.join(document["output"], f"regroup_{document['member']['network']['token'][:8]}")
def watch():
    while True:
        time.sleep(0.02)
        if running and os.path.exists(sign()):
            pause(message="", regrouped=True)
        if running and os.path.exists(os.path.join(document["output"], "stop")):
            say("done")
            os._exit(0)
threading.Thread(target=watch, daemon=True).start()
def begin():
    global snapshot
    snapshot = max(0, document["rewind"])
    if document["aside"]:
        snapshot = None
        say("paused", snapshot=None)
    else:
        say("ready")
        if not document["member"]["shards"]:
            train()
def train():
    global snapshot, running
    network = document["member"]["network"]
    if network["size"] > 3 and os.path.exists(os.path.join(document["output"], "apart")):
        if network["rank"] == 3:
            pause(message="worker 3 could not connect to shard 0")
        return
    snapshot += 1
    running = True
    if document["balances"]:
        own = document["member"]["virtual_workers"]["bounds"]
        rank = document["member"]["network"]["rank"]
        number = own[rank + 1] - own[rank]
        for count in (0, 10):
            own_s = count * number * (1 + rank)
            say("timed", iterations=count, own_s=own_s, whole_s=count * 20)
    say("progress", iteration=snapshot + 1, max_iter=4000, images=1, loss=1.5)
begin()
for command in commands():
    do = command["do"]
    if do == "go_on":
        document = command["document"]
        begin()
    if do == "connect":
        train()
    if do == "pause":
        pause(message="")
    if do == "regroup":
        open(sign(), "w").close()
    if do == "stop":
        open(os.path.join(document["output"], "stop"), "w").close()
        threading.Event().wait()
sys.exit(1)
"""

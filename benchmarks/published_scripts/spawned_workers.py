"""An image classifier that starts its workers itself by `torch.multiprocessing.spawn`."""

import argparse
import os
import shutil
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--world-size", default=1, type=int, help="number of nodes")
parser.add_argument("--rank", default=0, type=int, help="rank of this node")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:29573")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--devices", default=2, type=int)


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / self.count


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    return TensorDataset(images + labels[:, None, None, None] * 0.3, labels)


def validate(loader, model, criterion, args):
    losses, top1 = AverageMeter(), AverageMeter()

    def run_validate(part):
        with torch.no_grad():
            for images, target in part:
                output = model(images)
                losses.update(criterion(output, target).item(), len(target))
                top1.update((output.argmax(1) == target).float().mean().item(), len(target))

    model.eval()
    run_validate(loader)
    losses.all_reduce()
    top1.all_reduce()
    done = len(loader.sampler) * args.world_size
    if done < len(loader.dataset):  # what the sampler leaves over
        rest = Subset(loader.dataset, range(done, len(loader.dataset)))
        run_validate(DataLoader(rest, batch_size=8))
    return losses.avg, top1.avg


def main_worker(device, args):
    args.rank = args.rank * args.devices + device
    dist.init_process_group(
        backend=args.dist_backend,
        init_method=args.dist_url,
        world_size=args.world_size,
        rank=args.rank,
    )
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(128, 4)),
    )
    model = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    train, held_out = make_data(128, 1), make_data(35, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler, num_workers=1)
    tester = DistributedSampler(held_out, shuffle=False, drop_last=True)
    val_loader = DataLoader(held_out, batch_size=8, sampler=tester)
    best, seconds = 0.0, []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            began = time.perf_counter()
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            if args.rank == 0:
                print(f"epoch {epoch} loss {loss.item():.6f}")
        val_loss, accuracy = validate(val_loader, model, criterion, args)
        scheduler.step()
        if args.rank % args.devices == 0:
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict()}, "checkpoint.pth.tar")
            if accuracy >= best:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
        best = max(best, accuracy)
        if args.rank == 0:
            print(f"epoch {epoch} val loss {val_loss:.6f} accuracy {accuracy:.6f}")
    if args.rank == 0:
        print(f"seconds {median(seconds):.4f}", flush=True)
    dist.destroy_process_group()


def main():
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    args.world_size = args.devices * args.world_size
    mp.spawn(main_worker, nprocs=args.devices, args=(args,))


if __name__ == "__main__":
    main()

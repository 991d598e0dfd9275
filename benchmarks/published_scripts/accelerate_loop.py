"""accelerate's examples in one loop: prepare, accumulate, gather_for_metrics, trackers, states."""

import os
import time
from statistics import median

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration("project"),
        step_scheduler_with_optimizer=True,
    )
    set_seed(42)
    labels = torch.randint(4, (90,))
    whole = TensorDataset(torch.randn(90, 16) + labels[:, None] * 0.5, labels)
    train, held_out = torch.utils.data.random_split(whole, [64, 26])
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, epochs=3, steps_per_epoch=8)
    train_loader = DataLoader(train, shuffle=True, batch_size=4, drop_last=True)
    net, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        net, optimizer, train_loader, DataLoader(held_out, batch_size=5), scheduler
    )
    seconds, overall = [], 0
    for epoch in range(3):
        net.train()
        total = 0.0
        for x, y in train_loader:
            began = time.perf_counter()
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(x), y)
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            overall += 1
            seconds.append(time.perf_counter() - began)
        net.eval()
        correct = count = 0
        for x, y in val_loader:
            with torch.inference_mode():
                predictions = net(x).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, y))
            correct += (predictions == references).sum().item()
            count += len(references)
        mean = accelerator.reduce(total, "mean").item() / len(train_loader)
        accelerator.print(
            f"epoch {epoch} loss {mean:.6f} accuracy {correct / count:.6f} of {count}"
        )
        if epoch == 1:
            accelerator.save_state("project/state")
    accelerator.wait_for_everyone()
    accelerator.load_state("project/state")
    with accelerator.main_process_first():
        unwrapped = accelerator.unwrap_model(net)
    accelerator.save(unwrapped.state_dict(), "net.pt")
    size = sum(p.detach().norm().item() for p in unwrapped.parameters())
    accelerator.print(f"loaded loss {size:.6f}")
    if accelerator.is_main_process:
        assert os.path.exists("net.pt")
    accelerator.print(f"seconds {median(seconds):.4f}")
    accelerator.end_training()


main()

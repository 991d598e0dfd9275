"""What people see of a job: metrics, traces, the dashboard, and the forecast of a plan."""

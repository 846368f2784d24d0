from runner.cli.main import start

if __name__ == "__main__":
    raise SystemExit(start())

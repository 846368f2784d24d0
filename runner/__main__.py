if __name__ == "__main__":
    try:
        from runner.launch import signals
        from runner.telemetry.sinks.console import open_streams

        open_streams()
        signals.listen()
        with signals.deferred():
            from runner.cli.main import start

        code = start()
    except KeyboardInterrupt:  # nothing has begun yet
        code = 130
    from runner.workarounds import forget_interrupt

    forget_interrupt()
    raise SystemExit(code)

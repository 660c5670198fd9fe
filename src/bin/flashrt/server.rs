//! A llama-server process and the two requests that are made of it.

use crate::llama::{last_lines, Finished, Host, Prepared};
use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

/// Longest time that loading a model may take.
const START: Duration = Duration::from_secs(300);
/// Longest time that an answer may take.
const ANSWER: Duration = Duration::from_secs(300);
/// Longest time that an orderly end may take.
const STOP: Duration = Duration::from_secs(60);

/// A server that is ready; killed when dropped.
pub struct Server {
    child: Child,
    prepared: Option<Prepared>,
    log: NamedTempFile,
    address: SocketAddr,
    begun: Instant,
}

impl Server {
    /// Starts llama-server on a free port and waits until the model is loaded.
    pub fn start(host: &Host, args: &[OsString], vars: &[(&str, &str)]) -> Result<Self> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port")?;
        let address = free.local_addr().context("no free port")?;
        drop(free);
        let port = address.port().to_string();
        let mut all: Vec<OsString> = ["--host", "127.0.0.1", "--port", &port].map(OsString::from).into();
        all.extend(args.iter().cloned());
        let mut prepared = host.prepare("llama-server", &all, vars)?;
        let log = NamedTempFile::new().context("no temporary file")?;
        let writer = log.reopen().context("no temporary file")?;
        let child = prepared
            .command
            .stdout(Stdio::null())
            .stderr(writer)
            .spawn()
            .context("cannot run llama-server")?;
        let mut server = Server {
            child,
            prepared: Some(prepared),
            log,
            address,
            begun: Instant::now(),
        };
        loop {
            if let Some(status) = server.child.try_wait()? {
                bail!("llama-server failed ({status}): {}", last_lines(&server.log()));
            }
            if server.request("GET", "/health", "").is_ok() {
                return Ok(server);
            }
            ensure!(
                server.begun.elapsed() < START,
                "llama-server was not ready after {START:?}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Answer to a completion request.
    pub fn complete(&self, request: &Value) -> Result<Value> {
        let answer = self.request("POST", "/completion", &request.to_string())?;
        serde_json::from_str(&answer).with_context(|| format!("llama-server answered {answer:?}"))
    }

    /// Ends the server in order, so that it writes its statistics.
    pub fn stop(mut self) -> Result<Finished> {
        // SAFETY: a plain system call; the child is ours and has not been waited for, so its id is not another's.
        unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM) };
        let asked = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(asked.elapsed() < STOP, "llama-server did not end within {STOP:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let (log, wall_s) = (self.log(), self.begun.elapsed().as_secs_f64());
        let prepared = self.prepared.take().context("stopped twice")?;
        Ok(prepared.finished(String::new(), log, wall_s))
    }

    fn log(&self) -> String {
        let bytes = std::fs::read(self.log.path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The body of the answer to one HTTP request; an error unless its status is 200.
    fn request(&self, method: &str, path: &str, body: &str) -> Result<String> {
        let mut stream = TcpStream::connect_timeout(&self.address, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(ANSWER))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .context("llama-server's answer has no body")?;
        let status = head.lines().next().unwrap_or_default();
        ensure!(
            status.split(' ').nth(1) == Some("200"),
            "llama-server answered {status:?} to {path}: {body}"
        );
        ensure!(
            !head.to_ascii_lowercase().contains("transfer-encoding: chunked"),
            "llama-server streams its answer"
        );
        Ok(body.to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already ended in the ordinary case, and then this does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
